// Turning 16 x 16 words in AVX-512 registers, for the levels that have them.

#pragma once

#include <immintrin.h>

#include "level.h"

namespace {

// rows[i] word j becomes rows[j] word i.
inline __attribute__((always_inline)) void turn(__m512 (&rows)[16]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      const __m512d a = _mm512_castps_pd(t[i + half]), b = _mm512_castps_pd(t[i + half + 2]);
      rows[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      rows[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// As `narrow`, bit for bit.
inline void store(__m512 value, __mmask16 which, bf16* to) {
  const __m512i bits = _mm512_castps_si512(value), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i rounded =
      _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, _mm512_set1_epi32(0x7fc0));
  _mm256_mask_storeu_epi16(to, which, _mm512_cvtepi32_epi16(rounded));
}

inline void store(__m512 value, __mmask16 which, float* to) {
  _mm512_mask_storeu_ps(to, which, value);
}

// y[s * stride + i] = out[i * width + s] of the first `count` i and `rows` s; out is read in whole
// tiles of 16 x 16.
template <typename Out>
void spread(const float* out, std::int64_t width, std::int64_t rows, std::int64_t count, Out* y,
            std::int64_t stride) {
  for (std::int64_t i = 0; i < count; i += 16) {
    const __mmask16 which = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1u;
    for (std::int64_t s = 0; s < rows; s += 16) {
      __m512 tile[16];
      for (int k = 0; k < 16; ++k) tile[k] = _mm512_loadu_ps(out + (i + k) * width + s);
      turn(tile);
      const std::int64_t held = rows - s < 16 ? rows - s : 16;
      for (std::int64_t k = 0; k < held; ++k) store(tile[k], which, y + (s + k) * stride + i);
    }
  }
}

}  // namespace
