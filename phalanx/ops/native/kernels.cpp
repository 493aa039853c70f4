// Elementwise parts of a training step in bfloat16, each in one pass over memory.
//
// Arithmetic is float32, rounded once at the end. Every function has a reference in plain torch
// beside its caller (ops/norm.py, ops/gate.py, ops/loss.py, ops/attention.py). Compiled by
// ops/native/__init__.py without -ffast-math: a NaN stays a NaN.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace {

constexpr std::int64_t kSerial = 1 << 14;  // fewer elements are not worth waking threads

struct Gate {
  float value, slope;
};

// gelu(a), tanh form, is a * sigmoid(2 u(a)); silu(a) is a * sigmoid(a).
template <bool kGelu>
inline Gate gate_of(float a) {
  constexpr float k = 2.0f * 0.7978845608f, c = 0.044715f;
  const float z = kGelu ? k * (a + c * a * a * a) : a;
  const float dz = kGelu ? k * (1.0f + 3.0f * c * a * a) : 1.0f;
  const float s = 1.0f / (1.0f + exp_of(-z));
  return {a * s, s + a * s * (1.0f - s) * dz};
}

template <bool kGelu>
void gate_forward(const bf16* a, const bf16* b, bf16* out, std::int64_t size) {
#pragma omp parallel for simd schedule(static) if (size > kSerial)
  for (std::int64_t i = 0; i < size; ++i)
    out[i] = narrow(widen(narrow(gate_of<kGelu>(widen(a[i])).value)) * widen(b[i]));
}

template <bool kGelu>
void gate_backward(const bf16* grad, const bf16* a, const bf16* b, bf16* grad_a, bf16* grad_b,
                   std::int64_t size) {
#pragma omp parallel for simd schedule(static) if (size > kSerial)
  for (std::int64_t i = 0; i < size; ++i) {
    const Gate gate = gate_of<kGelu>(widen(a[i]));
    const float g = widen(grad[i]);
    grad_b[i] = narrow(g * widen(narrow(gate.value)));
    grad_a[i] = narrow(g * widen(b[i]) * gate.slope);
  }
}

// Rotates (first, second) halves of a row of 2c channels by (cos, sin); sign -1 rotates back.
inline void rotate(float* row, const float* cosine, const float* sine, std::int64_t c, float sign) {
#pragma omp simd
  for (std::int64_t i = 0; i < c; ++i) {
    const float first = row[i], second = row[i + c], s = sign * sine[i];
    row[i] = first * cosine[i] - second * s;
    row[i + c] = second * cosine[i] + first * s;
  }
}

inline float capped(float x, float cap) {
  if (cap == 0.0f) return x;
  const float e = exp_of(-2.0f * x / cap);
  return cap * (1.0f - e) / (1.0f + e);
}

template <bool kCapped>
void lse_row(const bf16* raw, std::int64_t count, float cap, float& peak, float& sum) {
  float higher = peak;
#pragma omp simd reduction(max : higher)
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = kCapped ? capped(widen(raw[i]), cap) : widen(raw[i]);
    higher = x > higher ? x : higher;
  }
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = kCapped ? capped(widen(raw[i]), cap) : widen(raw[i]);
    total += exp_of(x - higher);
  }
  sum = sum * exp_of(peak - higher) + total;
  peak = higher;
}

template <bool kCapped>
void gradient_row(bf16* raw, std::int64_t count, float cap, float lse) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = kCapped ? capped(widen(raw[i]), cap) : widen(raw[i]);
    const float slope = kCapped ? 1.0f - (x / cap) * (x / cap) : 1.0f;
    raw[i] = narrow(exp_of(x - lse) * slope);
  }
}

}  // namespace

extern "C" {

// out = act(a) * b, act(a) rounded as torch rounds it in between. kind: 0 gelu (tanh), 1 silu.
void phalanx_gate_forward(const bf16* a, const bf16* b, bf16* out, std::int64_t size,
                          std::int64_t kind) {
  kind == 0 ? gate_forward<true>(a, b, out, size) : gate_forward<false>(a, b, out, size);
}

void phalanx_gate_backward(const bf16* grad, const bf16* a, const bf16* b, bf16* grad_a,
                           bf16* grad_b, std::int64_t size,
                          std::int64_t kind) {
  kind == 0 ? gate_backward<true>(grad, a, b, grad_a, grad_b, size)
            : gate_backward<false>(grad, a, b, grad_a, grad_b, size);
}

// out = rotated(x / sqrt(mean(x^2) + eps) * scale); inverse: one number per row.
// rows are `heads` per token; cosine, sine [rows / heads, channels / 2], or null: no rotation.
void phalanx_norm_forward(const bf16* x, const float* scale, const float* cosine, const float* sine,
                          bf16* out, float* inverse, std::int64_t rows, std::int64_t heads,
                          std::int64_t channels, float eps) {
#pragma omp parallel if (rows * channels > kSerial)
  {
    std::vector<float> row(channels);
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      const bf16* in = x + r * channels;
      bf16* to = out + r * channels;
      float square = 0.0f;
#pragma omp simd reduction(+ : square)
      for (std::int64_t i = 0; i < channels; ++i) square += widen(in[i]) * widen(in[i]);
      const float by = 1.0f / std::sqrt(square / static_cast<float>(channels) + eps);
      inverse[r] = by;
      float* wide = row.data();
#pragma omp simd
      for (std::int64_t i = 0; i < channels; ++i) wide[i] = widen(in[i]) * by * scale[i];
      const std::int64_t at = r / heads * (channels / 2);
      if (cosine) rotate(wide, cosine + at, sine + at, channels / 2, 1.0f);
#pragma omp simd
      for (std::int64_t i = 0; i < channels; ++i) to[i] = narrow(wide[i]);
    }
  }
}

// The gradient of the input; that of the scale too unless grad_scale is null. Threads' parts of the
// latter are added in order, so equal runs give equal bits.
void phalanx_norm_backward(const bf16* grad, const bf16* x, const float* scale,
                           const float* inverse, const float* cosine, const float* sine,
                           bf16* grad_x, float* grad_scale, std::int64_t rows, std::int64_t heads,
                           std::int64_t channels) {
  const std::size_t threads = grad_scale ? omp_get_max_threads() : 0;
  std::vector<float> parts(threads * channels, 0.0f);
#pragma omp parallel if (rows * channels > kSerial)
  {
    std::vector<float> row(channels);
    float* wide = row.data();
    float* sums = parts.data() + (grad_scale ? omp_get_thread_num() * channels : 0);
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      const bf16 *g = grad + r * channels, *in = x + r * channels;
      bf16* to = grad_x + r * channels;
#pragma omp simd
      for (std::int64_t i = 0; i < channels; ++i) wide[i] = widen(g[i]);
      const std::int64_t at = r / heads * (channels / 2);
      if (cosine) rotate(wide, cosine + at, sine + at, channels / 2, -1.0f);
      const float by = inverse[r];
      if (grad_scale) {
#pragma omp simd
        for (std::int64_t i = 0; i < channels; ++i) sums[i] += wide[i] * widen(in[i]) * by;
      }
      float along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (std::int64_t i = 0; i < channels; ++i) {
        wide[i] *= scale[i];
        along += wide[i] * widen(in[i]);
      }
      along = along / static_cast<float>(channels) * by * by * by;
#pragma omp simd
      for (std::int64_t i = 0; i < channels; ++i)
        to[i] = narrow(wide[i] * by - widen(in[i]) * along);
    }
  }
  if (!grad_scale) return;
  std::copy(parts.begin(), parts.begin() + channels, grad_scale);
  for (std::size_t thread = 1; thread < threads; ++thread)
    for (std::int64_t i = 0; i < channels; ++i) grad_scale[i] += parts[thread * channels + i];
}

// A tile of logits [rows, count]: raises peak and sum of exp(logit - peak) of each row, and puts
// the capped logit of each row's target into `target` where the tile [start, start + count) has it.
void phalanx_loss_tile(const bf16* raw, const std::int64_t* targets, float* peak, float* sum,
                       float* target, std::int64_t rows, std::int64_t count, std::int64_t start,
                       float cap) {
#pragma omp parallel for schedule(static) if (rows * count > kSerial)
  for (std::int64_t r = 0; r < rows; ++r) {
    const bf16* row = raw + r * count;
    cap == 0.0f ? lse_row<false>(row, count, cap, peak[r], sum[r])
                : lse_row<true>(row, count, cap, peak[r], sum[r]);
    const std::int64_t at = targets[r] - start;
    if (at >= 0 && at < count) target[r] = capped(widen(row[at]), cap);
  }
}

// The tile becomes the gradient of the rows' losses by its raw logits.
void phalanx_loss_tile_gradient(bf16* raw, const std::int64_t* targets, const float* lse,
                                std::int64_t rows, std::int64_t count, std::int64_t start,
                                float cap) {
#pragma omp parallel for schedule(static) if (rows * count > kSerial)
  for (std::int64_t r = 0; r < rows; ++r) {
    bf16* row = raw + r * count;
    const std::int64_t at = targets[r] - start;
    const bool inside = at >= 0 && at < count;
    const float hit = inside ? capped(widen(row[at]), cap) : 0.0f;
    cap == 0.0f ? gradient_row<false>(row, count, cap, lse[r])
                : gradient_row<true>(row, count, cap, lse[r]);
    if (inside) {
      const float slope = cap == 0.0f ? 1.0f : 1.0f - (hit / cap) * (hit / cap);
      row[at] = narrow((exp_of(hit - lse[r]) - 1.0f) * slope);
    }
  }
}

}  // extern "C"
