// The serial kernels of a level, over its products; included by each level once, after it has
// defined kLanes, kColumns and, with products out[i * kColumns(rows) + s] = w[i] . x[s],
//
//   packed_bytes, pack, enter, leave
//   products(const bf16* w, int64_t stride, int64_t count, int64_t columns, const void* x,
//            int64_t rows, float* out)     count <= kBlockRows
//   columns_of(int64_t rows)               floats from a row of `out` to the next
//   spread(out, width, rows, count, y, stride)    y[s * stride + i] = out[i * width + s], rounded
//                                                 where y is bfloat16

#pragma once

#include <cmath>

#include "level.h"

namespace {

using std::int64_t;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef bf16 Halves __attribute__((vector_size(2 * kLanes)));

inline __attribute__((always_inline)) Floats widened(const bf16* at) {
  Halves half;
  __builtin_memcpy(&half, at, sizeof half);
  return (Floats)(__builtin_convertvector(half, Words) << 16);
}

inline __attribute__((always_inline)) Floats loaded(const float* at) {
  Floats value;
  __builtin_memcpy(&value, at, sizeof value);
  return value;
}

inline __attribute__((always_inline)) void stored(Floats value, float* at) {
  __builtin_memcpy(at, &value, sizeof value);
}

template <typename Out>
void linear(Matrix w, const void* x, int64_t rows, int64_t first, int64_t last, Out* y) {
  alignas(64) float out[kBlockRows * kMostRows] = {};
  const int64_t width = columns_of(rows);
  for (int64_t f = first; f < last; f += kBlockRows) {
    const int64_t count = least(kBlockRows, last - f);
    products(w.at + f * w.columns, w.columns, count, w.columns, x, rows, out);
    spread(out, width, rows, count, y + f, w.rows);
  }
}

inline float rank_of(float value) { return value != value ? INFINITY : value; }

// The largest of each column of `out`, whose first row is place `at`.
void take_largest(const float* out, int64_t count, int64_t width, int64_t rows, int64_t at,
                  float* values, float* ranks, std::int32_t* places) {
  for (int64_t i = 0; i < count; ++i) {
    const float* row = out + i * width;
    const std::int32_t place = static_cast<std::int32_t>(at + i);
#pragma omp simd
    for (int64_t s = 0; s < rows; ++s) {
      const float rank = rank_of(row[s]);
      const bool better = rank > ranks[s];
      ranks[s] = better ? rank : ranks[s];
      values[s] = better ? row[s] : values[s];
      places[s] = better ? place : places[s];
    }
  }
}

// One more candidate among `held` falling ones of at most `count`.
inline int64_t insert(float value, int64_t place, int64_t held, int64_t count, float* values,
                      int64_t* places) {
  int64_t at = held < count ? held : count - 1;
  for (; at > 0 && rank_of(values[at - 1]) < rank_of(value); --at)
    values[at] = values[at - 1], places[at] = places[at - 1];
  values[at] = value, places[at] = place;
  return held < count ? held + 1 : count;
}

void best(Matrix w, const void* x, int64_t rows, int64_t first, int64_t last, int64_t count,
          float* values, int64_t* places) {
  alignas(64) float out[kBlockRows * kMostRows];
  alignas(64) float ranks[kMostRows], largest[kMostRows];
  alignas(64) std::int32_t place_of[kMostRows];
  int64_t held = 0;
  const int64_t width = columns_of(rows);
  for (int64_t f = first; f < last; f += kBlockRows) {
    const int64_t block = least(kBlockRows, last - f);
    products(w.at + f * w.columns, w.columns, block, w.columns, x, rows, out);
    if (f == first)
      for (int64_t s = 0; s < rows; ++s)
        ranks[s] = count == 1 ? rank_of(out[s]) : -INFINITY, largest[s] = out[s],
        place_of[s] = static_cast<std::int32_t>(f);
    if (count == 1) {
      take_largest(out, block, width, rows, f, largest, ranks, place_of);
      continue;
    }
    for (int64_t i = 0; i < block; ++i) {
      const float* row = out + i * width;
      if (held < count) {
        for (int64_t s = 0; s < rows; ++s)
          insert(row[s], f + i, held, count, values + s * count, places + s * count);
        if (++held == count)
          for (int64_t s = 0; s < rows; ++s) ranks[s] = rank_of(values[s * count + count - 1]);
        continue;
      }
      int any = 0;
#pragma omp simd reduction(| : any)
      for (int64_t s = 0; s < rows; ++s) any |= rank_of(row[s]) > ranks[s];
      if (!any) continue;
      for (int64_t s = 0; s < rows; ++s)
        if (rank_of(row[s]) > ranks[s]) {
          insert(row[s], f + i, held, count, values + s * count, places + s * count);
          ranks[s] = rank_of(values[s * count + count - 1]);
        }
    }
  }
  if (count == 1)
    for (int64_t s = 0; s < rows; ++s) values[s] = largest[s], places[s] = place_of[s];
}

// weighted[g, c] += sum over `count` tokens of weights[t, g] * values[t, c].
template <int kHeads, int kVectors>
void add_values(const float* weights, int64_t width, const bf16* values, int64_t channels,
                int64_t count, float* weighted) {
  Floats sums[kHeads][kVectors];
  for (int g = 0; g < kHeads; ++g)
    for (int v = 0; v < kVectors; ++v) sums[g][v] = loaded(weighted + g * channels + v * kLanes);
  for (int64_t t = 0; t < count; ++t) {
    Floats row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = widened(values + t * channels + v * kLanes);
    for (int g = 0; g < kHeads; ++g)
      for (int v = 0; v < kVectors; ++v) sums[g][v] += weights[t * width + g] * row[v];
  }
  for (int g = 0; g < kHeads; ++g)
    for (int v = 0; v < kVectors; ++v) stored(sums[g][v], weighted + g * channels + v * kLanes);
}

template <int kHeads>
void add_value_heads(const float* weights, int64_t width, const bf16* values, int64_t channels,
                     int64_t count, float* weighted) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;  // as many sums as there are registers for
  int64_t c = 0;
  for (; c + kVectors * kLanes <= channels; c += kVectors * kLanes)
    add_values<kHeads, kVectors>(weights, width, values + c, channels, count, weighted + c);
  for (; c < channels; c += kLanes)
    add_values<kHeads, 1>(weights, width, values + c, channels, count, weighted + c);
}

// Scores [token, head] of the tokens of a part, `cells` per token; those that no head has are 0.
// `room` takes the scores of whole blocks, a row of `width` per token.
void score(const AttentionPart& part, void* packed, int64_t cells, float* room) {
  const int64_t width = columns_of(part.group), base = part.first / kBlockTokens * kBlockTokens;
  pack(part.queries, part.group, part.channels, packed);
  for (int64_t t = base; t < part.last; t += kBlockTokens) {
    const bf16* keys = part.keys + part.blocks[t / kBlockTokens] * part.block_stride;
    products(keys, part.channels, kBlockTokens, part.channels, packed, part.group,
             room + (t - base) * width);
  }
  for (int64_t t = part.first; t < part.last; ++t)
    for (int64_t g = 0; g < cells; ++g)
      room[(t - part.first) * cells + g] = g < part.group ? room[(t - base) * width + g] : 0.0f;
}

// Scores become weights exp(score - peak); peaks and sums per head. Vectors run across tokens and
// heads: lane l is head l % cells.
template <bool kCapped>
void weigh(const AttentionPart& part, int64_t cells, float* scores, float* peaks, float* sums) {
  alignas(64) float peak[kMostRows], sum[kMostRows];
  const int64_t lanes = cells < 16 ? 16 : cells, count = (part.last - part.first) * cells;
  const int64_t whole = (count + lanes - 1) / lanes * lanes;
  const float scale = part.scale, cap = part.cap;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    scores[i] *= scale;
    if (kCapped) {
      const float e = exp_of(-2.0f * scores[i] / cap);
      scores[i] = cap * (1.0f - e) / (1.0f + e);
    }
  }
  for (int64_t i = count; i < whole; ++i) scores[i] = -INFINITY;
  for (int64_t l = 0; l < lanes; ++l) peak[l] = -INFINITY, sum[l] = 0.0f;
  for (int64_t i = 0; i < whole; i += lanes)
#pragma omp simd
    for (int64_t l = 0; l < lanes; ++l)
      peak[l] = scores[i + l] > peak[l] ? scores[i + l] : peak[l];
  for (int64_t l = cells; l < lanes; ++l)
    peak[l % cells] = peak[l] > peak[l % cells] ? peak[l] : peak[l % cells];
  for (int64_t l = cells; l < lanes; ++l) peak[l] = peak[l % cells];
  for (int64_t i = 0; i < whole; i += lanes)
#pragma omp simd
    for (int64_t l = 0; l < lanes; ++l) {
      scores[i + l] = exp_of(scores[i + l] - peak[l]);
      sum[l] += scores[i + l];
    }
  for (int64_t l = cells; l < lanes; ++l) sum[l % cells] += sum[l];
  for (int64_t g = 0; g < part.group; ++g) peaks[g] = peak[g], sums[g] = sum[g];
}

void attend(const AttentionPart& part, void* packed, float* weighted, float* peaks, float* sums) {
  alignas(64) float scores[(kSplitTokens + kBlockTokens) * kMostRows];
  const int64_t channels = part.channels;
  int64_t cells = 1;  // the group, rounded up to what divides a vector or what vectors divide
  while (cells < part.group) cells = cells < 16 ? 2 * cells : cells + 16;
  score(part, packed, cells, scores);
  part.cap == 0.0f ? weigh<false>(part, cells, scores, peaks, sums)
                   : weigh<true>(part, cells, scores, peaks, sums);
  for (int64_t i = 0; i < part.group * channels; ++i) weighted[i] = 0.0f;
  for (int64_t t = part.first; t < part.last;) {
    const int64_t inside = t % kBlockTokens, count = least(kBlockTokens - inside, part.last - t);
    const bf16* values = part.values + part.blocks[t / kBlockTokens] * part.block_stride +
                         inside * channels;
    const float* weights = scores + (t - part.first) * cells;
    int64_t g = 0;
    for (; g + 4 <= part.group; g += 4)
      add_value_heads<4>(weights + g, cells, values, channels, count, weighted + g * channels);
    for (; g < part.group; ++g)
      add_value_heads<1>(weights + g, cells, values, channels, count, weighted + g * channels);
    t += count;
  }
}

}  // namespace

#define PHALANX_LEVEL(function, title)                                                   \
  extern "C" const Level* function() {                                                   \
    static const Level level{title,       enter,         leave, packed_bytes, pack,      \
                             linear<bf16>, linear<float>, best,  attend};                \
    return &level;                                                                       \
  }
