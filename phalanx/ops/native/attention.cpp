// Causal attention over packed documents in bfloat16, forward and backward, for processors with
// AVX-512 bf16 dot products. Scores, softmax and sums are float32; probabilities and their
// gradients are rounded to bfloat16 before they are multiplied.
//
// Tasks are (document, query head), so results do not depend on the number of threads. Legend: q, k,
// v [S, heads, C]; a block of queries meets the keys [first, end) that any of them sees.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define PHALANX_HAS_BF16 1
#else
#define PHALANX_HAS_BF16 0
#endif

extern "C" int phalanx_attention_supported() { return PHALANX_HAS_BF16; }

#if PHALANX_HAS_BF16

namespace {

using std::int64_t;
constexpr int64_t kBlock = 32;  // queries that are computed together

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

struct Shape {
  int64_t heads, kv_heads, channels, window;  // window 0: none
  float scale;

  int64_t q_stride() const { return heads * channels; }
  int64_t kv_stride() const { return kv_heads * channels; }
  int64_t first_key(int64_t query) const {
    return window ? std::max<int64_t>(0, query - window + 1) : 0;
  }
};

// What a task needs room for; kept per thread.
struct Room {
  std::vector<float> scores, grads, rows;
  std::vector<bf16> p, ds;
  std::vector<std::uint32_t> values, keys, queries, outs, turned_p, turned_ds;

  void fit(int64_t tokens, int64_t channels, bool backward) {
    const int64_t width = tokens + 2, pairs = (tokens + 3) / 2 * channels;
    grow(scores, kBlock * width), grow(p, kBlock * width), grow(rows, kBlock * channels);
    grow(values, pairs);
    if (!backward) return;
    grow(grads, kBlock * width), grow(ds, kBlock * width);
    grow(turned_p, kBlock / 2 * width), grow(turned_ds, kBlock / 2 * width);
    grow(keys, pairs), grow(queries, kBlock / 2 * channels), grow(outs, kBlock / 2 * channels);
  }

  template <typename T>
  static void grow(std::vector<T>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  }
};

// Keys that a block of queries sees: [first, end), first even, and an even number of columns.
struct Seen {
  int64_t first, count, width;
};

Seen seen_by(int64_t start, int64_t end, const Shape& shape) {
  const int64_t first = shape.first_key(start) / 2 * 2;
  return {first, end - first, (end - first + 1) / 2 * 2};
}

// Scores of a block become probabilities, exactly zero where nothing is seen; p in bfloat16.
void softmax_block(float* scores, bf16* p, int64_t start, int64_t end, Seen seen, const Shape& shape) {
  for (int64_t i = start; i < end; ++i) {
    float* row = scores + (i - start) * seen.width;
    bf16* to = p + (i - start) * seen.width;
    const int64_t low = shape.first_key(i) - seen.first, high = i + 1 - seen.first;
    float peak = row[low];
#pragma omp simd reduction(max : peak)
    for (int64_t j = low; j < high; ++j) peak = row[j] > peak ? row[j] : peak;
    float sum = 0.0f;
    const float scale = shape.scale;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = low; j < high; ++j) {
      row[j] = exp_of((row[j] - peak) * scale);
      sum += row[j];
    }
    const float by = 1.0f / sum;
    for (int64_t j = 0; j < low; ++j) row[j] = 0.0f, to[j] = 0;
#pragma omp simd
    for (int64_t j = low; j < high; ++j) {
      row[j] *= by;
      to[j] = narrow(row[j]);
    }
    for (int64_t j = high; j < seen.width; ++j) row[j] = 0.0f, to[j] = 0;
  }
}

void forward_task(const bf16* q, const bf16* k, const bf16* v, bf16* out, int64_t tokens,
                  const Shape& shape, Room& room) {
  room.fit(tokens, shape.channels, false);
  interleave(v, shape.kv_stride(), tokens, shape.channels, room.values.data());
  for (int64_t start = 0; start < tokens; start += kBlock) {
    const int64_t end = std::min(start + kBlock, tokens), count = end - start;
    const Seen seen = seen_by(start, end, shape);
    dot_rows(q + start * shape.q_stride(), shape.q_stride(), count,
             k + seen.first * shape.kv_stride(), shape.kv_stride(), seen.count, shape.channels,
             room.scores.data(), seen.width);
    softmax_block(room.scores.data(), room.p.data(), start, end, seen, shape);
    std::fill_n(room.rows.begin(), count * shape.channels, 0.0f);
    add_rows(as_rows(room.p, seen.width), count,
             room.values.data() + seen.first / 2 * shape.channels, seen.width / 2, shape.channels,
             room.rows.data());
    for (int64_t i = 0; i < count; ++i) {
      const float* row = room.rows.data() + i * shape.channels;
      bf16* to = out + (start + i) * shape.q_stride();
#pragma omp simd
      for (int64_t c = 0; c < shape.channels; ++c) to[c] = narrow(row[c]);
    }
  }
}

void backward_task(const bf16* grad, const bf16* q, const bf16* k, const bf16* v, bf16* grad_q,
                   float* grad_k, float* grad_v, int64_t tokens, const Shape& shape, Room& room) {
  room.fit(tokens, shape.channels, true);
  const int64_t channels = shape.channels, q_stride = shape.q_stride(), kv = shape.kv_stride();
  interleave(k, kv, tokens, channels, room.keys.data());
  std::fill_n(grad_k, tokens * channels, 0.0f);
  std::fill_n(grad_v, tokens * channels, 0.0f);
  for (int64_t start = 0; start < tokens; start += kBlock) {
    const int64_t end = std::min(start + kBlock, tokens), count = end - start;
    const Seen seen = seen_by(start, end, shape);
    float *p = room.scores.data(), *dp = room.grads.data();
    dot_rows(q + start * q_stride, q_stride, count, k + seen.first * kv, kv, seen.count, channels, p,
             seen.width);
    softmax_block(p, room.p.data(), start, end, seen, shape);
    dot_rows(grad + start * q_stride, q_stride, count, v + seen.first * kv, kv, seen.count, channels,
             dp, seen.width);
    for (int64_t i = 0; i < count; ++i) {
      const float *p_row = p + i * seen.width, *dp_row = dp + i * seen.width;
      bf16* to = room.ds.data() + i * seen.width;
      float along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (int64_t j = 0; j < seen.count; ++j) along += p_row[j] * dp_row[j];
#pragma omp simd
      for (int64_t j = 0; j < seen.count; ++j) to[j] = narrow(p_row[j] * (dp_row[j] - along));
      for (int64_t j = seen.count; j < seen.width; ++j) to[j] = 0;
    }
    std::fill_n(room.rows.begin(), count * channels, 0.0f);
    add_rows(as_rows(room.ds, seen.width), count, room.keys.data() + seen.first / 2 * channels,
             seen.width / 2, channels, room.rows.data());
    for (int64_t i = 0; i < count; ++i) {
      const float* row = room.rows.data() + i * channels;
      bf16* to = grad_q + (start + i) * q_stride;
      const float scale = shape.scale;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) to[c] = narrow(row[c] * scale);
    }
    interleave(room.p.data(), seen.width, count, seen.width, room.turned_p.data());
    interleave(room.ds.data(), seen.width, count, seen.width, room.turned_ds.data());
    interleave(grad + start * q_stride, q_stride, count, channels, room.outs.data());
    interleave(q + start * q_stride, q_stride, count, channels, room.queries.data());
    const int64_t num_pairs = (count + 1) / 2;
    add_rows(as_columns(room.turned_p, seen.width), seen.count, room.outs.data(), num_pairs,
             channels, grad_v + seen.first * channels);
    add_rows(as_columns(room.turned_ds, seen.width), seen.count, room.queries.data(), num_pairs,
             channels, grad_k + seen.first * channels);
  }
}

}  // namespace

extern "C" {

// bounds: num_documents + 1 offsets into the rows. channels: a multiple of 32.
void phalanx_attention_forward(const bf16* q, const bf16* k, const bf16* v, bf16* out,
                               const int64_t* bounds, int64_t num_documents, int64_t heads,
                               int64_t kv_heads, int64_t channels, int64_t window, float scale) {
  const Shape shape{heads, kv_heads, channels, window, scale};
#pragma omp parallel
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t document = 0; document < num_documents; ++document)
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t start = bounds[document], tokens = bounds[document + 1] - start;
        const int64_t kv_at = start * shape.kv_stride() + head / (heads / kv_heads) * channels;
        const int64_t q_at = start * shape.q_stride() + head * channels;
        forward_task(q + q_at, k + kv_at, v + kv_at, out + q_at, tokens, shape, room);
      }
  }
}

// parts_k, parts_v: room for every query head's part of the gradients, [heads, rows, channels].
void phalanx_attention_backward(const bf16* grad, const bf16* q, const bf16* k, const bf16* v,
                                bf16* grad_q, bf16* grad_k, bf16* grad_v, float* parts_k,
                                float* parts_v, const int64_t* bounds, int64_t num_documents, int64_t heads, int64_t kv_heads,
                                int64_t channels, int64_t window, float scale) {
  const Shape shape{heads, kv_heads, channels, window, scale};
  const int64_t num_rows = bounds[num_documents], group = heads / kv_heads;
#pragma omp parallel
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t document = 0; document < num_documents; ++document)
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t start = bounds[document], tokens = bounds[document + 1] - start;
        const int64_t kv_at = start * shape.kv_stride() + head / group * channels;
        const int64_t q_at = start * shape.q_stride() + head * channels;
        const int64_t part = (head * num_rows + start) * channels;
        backward_task(grad + q_at, q + q_at, k + kv_at, v + kv_at, grad_q + q_at,
                      parts_k + part, parts_v + part, tokens, shape, room);
      }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t kv = 0; kv < kv_heads; ++kv) {
        bf16* to_k = grad_k + (row * kv_heads + kv) * channels;
        bf16* to_v = grad_v + (row * kv_heads + kv) * channels;
        for (int64_t c = 0; c < channels; ++c) {
          float sum_k = 0.0f, sum_v = 0.0f;
          for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
            const int64_t at = (head * num_rows + row) * channels + c;
            sum_k += parts_k[at], sum_v += parts_v[at];
          }
          to_k[c] = narrow(sum_k * scale), to_v[c] = narrow(sum_v);
        }
      }
  }
}

}  // extern "C"

#endif
