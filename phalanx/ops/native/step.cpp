// What a serving step does between its matrix products, each in one pass, in bfloat16.
//
// Arithmetic is float32 and rounded where the plain torch code of engines/serve rounds.

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace {

using std::int64_t;
constexpr int64_t kSerial = 1 << 14;  // fewer elements are not worth waking threads

inline float inverse_root(const bf16* row, int64_t channels, float eps) {
  float square = 0.0f;
#pragma omp simd reduction(+ : square)
  for (int64_t i = 0; i < channels; ++i) square += widen(row[i]) * widen(row[i]);
  return 1.0f / std::sqrt(square / static_cast<float>(channels) + eps);
}

inline void normalise(const bf16* row, const float* scale, bf16* to, int64_t channels, float eps) {
  const float by = inverse_root(row, channels, eps);
#pragma omp simd
  for (int64_t i = 0; i < channels; ++i) to[i] = narrow(widen(row[i]) * by * scale[i]);
}

// One head, normalised where there is a scale, and rotated.
inline void turn(const bf16* row, const float* scale, const float* cosine, const float* sine,
                 bf16* to, int64_t channels, float eps) {
  const int64_t half = channels / 2;
  const float by = scale ? inverse_root(row, channels, eps) : 1.0f;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(row[i]) * by * (scale ? scale[i] : 1.0f);
    const float b = widen(row[i + half]) * by * (scale ? scale[i + half] : 1.0f);
    to[i] = narrow(a * cosine[i] - b * sine[i]);
    to[i + half] = narrow(b * cosine[i] + a * sine[i]);
  }
}

}  // namespace

extern "C" {

// x += norm(y) * after in place (y null: nothing; after null: y itself), then
// normed = norm(x) * before (before null: nothing). Rows of x, y and normed have `channels`.
void phalanx_add_norm(bf16* x, const bf16* y, const float* after, const float* before,
                      bf16* normed, int64_t rows, int64_t channels, float eps) {
#pragma omp parallel for schedule(static) if (rows * channels > kSerial)
  for (int64_t r = 0; r < rows; ++r) {
    bf16* row = x + r * channels;
    if (y) {
      const bf16* added = y + r * channels;
      const float by = after ? inverse_root(added, channels, eps) : 1.0f;
#pragma omp simd
      for (int64_t i = 0; i < channels; ++i) {
        const float term = after ? widen(narrow(widen(added[i]) * by * after[i])) : widen(added[i]);
        row[i] = narrow(widen(row[i]) + term);
      }
    }
    if (before) normalise(row, before, normed + r * channels, channels, eps);
  }
}

// Rows of gate_up [rows, 2 * channels] become activation(gate) * up; kind as in kernels.cpp.
void phalanx_gate_pairs(const bf16* gate_up, bf16* out, int64_t rows, int64_t channels,
                        int64_t kind) {
#pragma omp parallel for schedule(static) if (rows * channels > kSerial)
  for (int64_t r = 0; r < rows; ++r) {
    const bf16 *gate = gate_up + 2 * r * channels, *up = gate + channels;
    bf16* to = out + r * channels;
    if (kind == 0) {
#pragma omp simd
      for (int64_t i = 0; i < channels; ++i) {
        const float a = widen(gate[i]);
        const float z = 2.0f * 0.7978845608f * (a + 0.044715f * a * a * a);
        to[i] = narrow(widen(narrow(a / (1.0f + exp_of(-z)))) * widen(up[i]));
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < channels; ++i) {
        const float a = widen(gate[i]);
        to[i] = narrow(widen(narrow(a / (1.0f + exp_of(-a)))) * widen(up[i]));
      }
    }
  }
}

// What qkv gave, [rows, num_made, channels], becomes queries [rows, heads, channels]; keys and
// values go into the pools at `places` [rows, kv_heads], counted in rows of `channels`.
//
// scale [heads + kv_heads, channels] or null; cosine, sine [rows, channels / 2]. num_made is heads
// (no keys), heads + kv_heads (keys are the values too) or heads + 2 kv_heads.
void phalanx_turn_and_store(const bf16* made, const float* scale, const float* cosine,
                            const float* sine, const int64_t* places, bf16* queries, bf16* keys,
                            bf16* values, int64_t rows, int64_t num_made, int64_t heads,
                            int64_t kv_heads, int64_t channels, int64_t norms_values, float eps) {
  std::vector<float> ones(norms_values ? channels : 0, 1.0f);
#pragma omp parallel for schedule(static) if (rows * num_made * channels > kSerial)
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* row = made + r * num_made * channels;
    const float *c = cosine + r * (channels / 2), *s = sine + r * (channels / 2);
    for (int64_t h = 0; h < heads; ++h)
      turn(row + h * channels, scale ? scale + h * channels : nullptr, c, s,
           queries + (r * heads + h) * channels, channels, eps);
    if (num_made == heads) continue;
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t place = places[r * kv_heads + h] * channels, at = heads + h;
      turn(row + at * channels, scale ? scale + at * channels : nullptr, c, s, keys + place,
           channels, eps);
      const bf16* value = row + (num_made - kv_heads + h) * channels;
      if (norms_values)
        normalise(value, ones.data(), values + place, channels, eps);
      else
        for (int64_t i = 0; i < channels; ++i) values[place + i] = value[i];
    }
  }
}

// Reads every word with all threads, so that its time says how fast memory can be read.
void phalanx_read_all(const std::uint64_t* words, int64_t count, std::uint64_t* sum) {
  std::uint64_t total = 0;
#pragma omp parallel for simd schedule(static) reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += words[i];
  *sum = total;
}

}  // extern "C"
