// The level of AVX-512 dot products of bfloat16. x is kept in bfloat16, rows filled up with zeros.

#include <immintrin.h>

#include "level.h"
#include "turned.h"

namespace {

constexpr int kLanes = 16;

std::int64_t columns_of(std::int64_t rows) { return (rows + 15) / 16 * 16; }
void products(const bf16*, std::int64_t, std::int64_t, std::int64_t, const void*, std::int64_t,
              float*);
void pack(const bf16*, std::int64_t, std::int64_t, void*);

void enter() {}
void leave() {}

std::int64_t padded(std::int64_t columns) { return (columns + 31) / 32 * 32; }

std::int64_t packed_bytes(std::int64_t rows, std::int64_t columns) {
  return 2 * rows * padded(columns);
}

}  // namespace

#include "level_body.h"

namespace {

void pack(const bf16* x, int64_t rows, int64_t columns, void* packed) {
  const int64_t width = padded(columns);
  for (int64_t s = 0; s < rows; ++s) {
    bf16* to = static_cast<bf16*>(packed) + s * width;
    __builtin_memcpy(to, x + s * columns, 2 * columns);
    for (int64_t c = columns; c < width; ++c) to[c] = 0;
  }
}

inline __m512bh load(const bf16* at) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at));
}

// Products of kW rows of w with kX rows of x, columns in steps of 32, the last ones masked.
template <int kW, int kX>
void dots(const bf16* w, int64_t stride, int64_t columns, const bf16* x, int64_t x_stride,
          float* out, int64_t width) {
  __m512 sums[kW][kX];
  for (int i = 0; i < kW; ++i)
    for (int s = 0; s < kX; ++s) sums[i][s] = _mm512_setzero_ps();
  int64_t c = 0;
  for (; c + 32 <= columns; c += 32) {
    __m512bh column[kX];
    for (int s = 0; s < kX; ++s) column[s] = load(x + s * x_stride + c);
    for (int i = 0; i < kW; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(w + (i + kW) * stride + c), _MM_HINT_T0);
      const __m512bh row = load(w + i * stride + c);
      for (int s = 0; s < kX; ++s) sums[i][s] = _mm512_dpbf16_ps(sums[i][s], row, column[s]);
    }
  }
  if (c < columns) {
    const __mmask32 left = (1u << (columns - c)) - 1u;
    for (int i = 0; i < kW; ++i) {
      const __m512bh row =
          reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(left, w + i * stride + c));
      for (int s = 0; s < kX; ++s)
        sums[i][s] = _mm512_dpbf16_ps(sums[i][s], row, load(x + s * x_stride + c));
    }
  }
  for (int i = 0; i < kW; ++i)
    for (int s = 0; s < kX; ++s) out[i * width + s] = _mm512_reduce_add_ps(sums[i][s]);
}

template <int kW>
void dot_rows(const bf16* w, int64_t stride, int64_t columns, const bf16* x, int64_t rows,
              float* out, int64_t width) {
  const int64_t x_stride = padded(columns);
  int64_t s = 0;
  for (; s + 4 <= rows; s += 4)
    dots<kW, 4>(w, stride, columns, x + s * x_stride, x_stride, out + s, width);
  for (; s < rows; ++s)
    dots<kW, 1>(w, stride, columns, x + s * x_stride, x_stride, out + s, width);
}

void products(const bf16* w, int64_t stride, int64_t count, int64_t columns, const void* packed,
              int64_t rows, float* out) {
  const bf16* x = static_cast<const bf16*>(packed);
  const int64_t width = columns_of(rows);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    dot_rows<4>(w + i * stride, stride, columns, x, rows, out + i * width, width);
  for (; i < count; ++i)
    dot_rows<1>(w + i * stride, stride, columns, x, rows, out + i * width, width);
}

}  // namespace

PHALANX_LEVEL(phalanx_level_avx512_bf16, "avx512_bf16")
