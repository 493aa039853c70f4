// A whole layer of a decode step in one call: the kernels of serving.cpp and step.cpp in a row.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"

using std::int64_t;

extern "C" {

void phalanx_packed_linear(const bf16* x, const bf16* w, bf16* y, int64_t rows, int64_t outputs,
                           int64_t columns);
void phalanx_paged_decode(const bf16* q, const bf16* keys, const bf16* values,
                          const int64_t* blocks, const void* seen, bf16* out, int64_t requests,
                          int64_t num_blocks, int64_t kv_heads, int64_t group, int64_t channels,
                          float scale, float cap);
void phalanx_add_norm(bf16* x, const bf16* y, const float* after, const float* before, bf16* normed,
                      int64_t rows, int64_t channels, float eps);
void phalanx_gate_pairs(const bf16* gate_up, bf16* out, int64_t rows, int64_t channels,
                        int64_t kind);
void phalanx_turn_and_store(const bf16* made, const float* scale, const float* cosine,
                            const float* sine, const int64_t* places, bf16* queries, bf16* keys,
                            bf16* values, int64_t rows, int64_t num_made, int64_t heads,
                            int64_t kv_heads, int64_t channels, int64_t norms_values, float eps);

// x and normed [rows, width] become those of the next layer. Arguments are those of the functions
// above; num_made heads come out of qkv, `inner` channels out of a gate.
void phalanx_decode_layer(bf16* x, bf16* normed, const bf16* qkv, const bf16* out,
                          const bf16* gate_up, const bf16* down, const float* qk_norm,
                          const float* after_attention, const float* before_mlp,
                          const float* after_mlp, const float* before, const float* cosine,
                          const float* sine, const int64_t* places, const int64_t* blocks,
                          const void* seen, bf16* keys, bf16* values, int64_t rows, int64_t width,
                          int64_t num_made, int64_t heads, int64_t kv_heads, int64_t channels,
                          int64_t inner, int64_t num_blocks, int64_t gate, int64_t norms_values,
                          float scale, float eps) {
  static thread_local std::vector<bf16> first, second, third;
  const int64_t made = num_made * channels, attended = heads * channels;
  first.resize(rows * std::max({made, width, 2 * inner}));
  second.resize(rows * std::max(attended, inner));
  third.resize(rows * std::max(attended, width));
  phalanx_packed_linear(normed, qkv, first.data(), rows, made, width);
  phalanx_turn_and_store(first.data(), qk_norm, cosine, sine, places, second.data(), keys, values,
                         rows, num_made, heads, kv_heads, channels, norms_values, eps);
  phalanx_paged_decode(second.data(), keys, values, blocks, seen, third.data(), rows, num_blocks,
                       kv_heads, heads / kv_heads, channels, scale, 0.0f);
  phalanx_packed_linear(third.data(), out, first.data(), rows, width, attended);
  phalanx_add_norm(x, first.data(), after_attention, before_mlp, normed, rows, width, eps);
  phalanx_packed_linear(normed, gate_up, first.data(), rows, 2 * inner, width);
  phalanx_gate_pairs(first.data(), second.data(), rows, inner, gate);
  phalanx_packed_linear(second.data(), down, third.data(), rows, width, inner);
  phalanx_add_norm(x, third.data(), after_mlp, before, normed, rows, width, eps);
}

}  // extern "C"
