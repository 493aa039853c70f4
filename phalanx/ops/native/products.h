// Products of bfloat16 rows, summed in float32, with the bf16 dot products of AVX-512.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define PHALANX_HAS_BF16 1
#else
#define PHALANX_HAS_BF16 0
#endif

#if PHALANX_HAS_BF16

namespace {

using std::int64_t;

inline __m512bh load(const bf16* at) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at));
}

// Sums of four accumulators, one per lane.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// out[i, j] = a[i] . b[j]; rows of both are C channels apart by their strides, out by `width`.
void dot_rows(const bf16* a, int64_t a_stride, int64_t m, const bf16* b, int64_t b_stride, int64_t n,
              int64_t channels, float* out, int64_t width) {
  for (int64_t i = 0; i < m; i += 4) {
    const bf16* rows[4];
    for (int64_t x = 0; x < 4; ++x) rows[x] = a + std::min(i + x, m - 1) * a_stride;
    for (int64_t j = 0; j < n; j += 4) {
      const bf16* columns[4];
      for (int64_t y = 0; y < 4; ++y) columns[y] = b + std::min(j + y, n - 1) * b_stride;
      __m512 acc[4][4];
      for (auto& each : acc)
        for (auto& one : each) one = _mm512_setzero_ps();
      for (int64_t c = 0; c < channels; c += 32) {
        const __m512bh r0 = load(rows[0] + c), r1 = load(rows[1] + c);
        const __m512bh r2 = load(rows[2] + c), r3 = load(rows[3] + c);
#pragma GCC unroll 4
        for (int64_t y = 0; y < 4; ++y) {
          const __m512bh column = load(columns[y] + c);
          acc[0][y] = _mm512_dpbf16_ps(acc[0][y], r0, column);
          acc[1][y] = _mm512_dpbf16_ps(acc[1][y], r1, column);
          acc[2][y] = _mm512_dpbf16_ps(acc[2][y], r2, column);
          acc[3][y] = _mm512_dpbf16_ps(acc[3][y], r3, column);
        }
      }
      for (int64_t x = 0; x < std::min<int64_t>(4, m - i); ++x) {
        float four[4];
        _mm_storeu_ps(four, sums_of(acc[x][0], acc[x][1], acc[x][2], acc[x][3]));
        for (int64_t y = 0; y < std::min<int64_t>(4, n - j); ++y) out[(i + x) * width + j + y] = four[y];
      }
    }
  }
}

// pairs[k / 2, c] = (row k, row k + 1) of channel c; a missing last row counts as zeros.
void interleave(const bf16* from, int64_t stride, int64_t rows, int64_t channels,
                std::uint32_t* pairs) {
  for (int64_t k = 0; k < rows; k += 2) {
    const bf16* low = from + k * stride;
    const bf16* high = k + 1 < rows ? low + stride : nullptr;
    std::uint32_t* to = pairs + k / 2 * channels;
    if (high) {
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c)
        to[c] = low[c] | static_cast<std::uint32_t>(high[c]) << 16;
    } else {
      for (int64_t c = 0; c < channels; ++c) to[c] = low[c];
    }
  }
}

// A matrix of pairs (k, k + 1) of factors: row i, pair k at from[i * row_step + k * pair_step].
struct Factors {
  const std::uint32_t* from;
  int64_t row_step, pair_step;
};

// out[i, c] += sum over k of factors[i, k] * rows[k, c], rows given as pairs.
template <int kVectors>
void add_rows(Factors factors, int64_t m, const std::uint32_t* pairs, int64_t num_pairs,
              int64_t channels, int64_t from, float* out) {
  for (int64_t i = 0; i < m; i += 4) {
    const std::uint32_t* rows[4];
    for (int64_t x = 0; x < 4; ++x)
      rows[x] = factors.from + std::min(i + x, m - 1) * factors.row_step;
    __m512 acc[4][kVectors];
    for (int64_t x = 0; x < 4; ++x)
      for (int v = 0; v < kVectors; ++v)
        acc[x][v] = _mm512_loadu_ps(out + std::min(i + x, m - 1) * channels + from + 16 * v);
    for (int64_t k = 0; k < num_pairs; ++k) {
      __m512bh column[kVectors];
      for (int v = 0; v < kVectors; ++v)
        column[v] =
            reinterpret_cast<__m512bh>(_mm512_loadu_si512(pairs + k * channels + from + 16 * v));
      for (int64_t x = 0; x < 4; ++x) {
        const int two = static_cast<int>(rows[x][k * factors.pair_step]);
        const __m512bh factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
        for (int v = 0; v < kVectors; ++v)
          acc[x][v] = _mm512_dpbf16_ps(acc[x][v], factor, column[v]);
      }
    }
    for (int64_t x = 0; x < std::min<int64_t>(4, m - i); ++x)
      for (int v = 0; v < kVectors; ++v)
        _mm512_storeu_ps(out + (i + x) * channels + from + 16 * v, acc[x][v]);
  }
}

void add_rows(Factors factors, int64_t m, const std::uint32_t* pairs, int64_t num_pairs,
              int64_t channels, float* out) {
  int64_t from = 0;
  for (; from + 64 <= channels; from += 64)
    add_rows<4>(factors, m, pairs, num_pairs, channels, from, out);
  for (; from < channels; from += 16)
    add_rows<1>(factors, m, pairs, num_pairs, channels, from, out);
}

// Rows of bfloat16 of an even width as they are; and their transpose, from interleaved rows.
Factors as_rows(const std::vector<bf16>& p, int64_t width) {
  return {reinterpret_cast<const std::uint32_t*>(p.data()), width / 2, 1};
}

Factors as_columns(const std::vector<std::uint32_t>& interleaved, int64_t width) {
  return {interleaved.data(), 1, width};
}

}  // namespace

#endif
