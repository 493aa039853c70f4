// Attention in bfloat16, forward and backward, for processors with AVX-512 bf16 dot products: causal
// over packed documents, and of queries that each see a stretch of the keys, with the logarithm of
// the sum of exponentials. Scores, softmax and sums are float32; probabilities and their gradients
// are rounded to bfloat16 before they are multiplied.
//
// Tasks are (document, query head), so results do not depend on the number of threads. Legend: q, k,
// v [S, heads, C]; a block of queries meets the keys [first, end) that any of them sees.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "products.h"

extern "C" int phalanx_attention_supported() { return PHALANX_HAS_BF16; }

#if PHALANX_HAS_BF16

namespace {

constexpr int64_t kBlock = 32;  // queries that are computed together

struct Shape {
  int64_t heads, kv_heads, channels;
  float scale;

  int64_t q_stride() const { return heads * channels; }
  int64_t kv_stride() const { return kv_heads * channels; }
};

// Query i sees the keys first[i] .. last[i] - 1; neither falls from a query to the next.
struct Stretches {
  const int64_t *first, *last;
  int64_t queries, keys;
};

// The stretches of a document, causal within a window (0: none); kept until the thread's next call.
Stretches of_document(int64_t tokens, int64_t window) {
  static thread_local std::vector<int64_t> first, last;
  first.resize(tokens), last.resize(tokens);
  for (int64_t i = 0; i < tokens; ++i) {
    first[i] = window ? std::max<int64_t>(0, i - window + 1) : 0;
    last[i] = i + 1;
  }
  return {first.data(), last.data(), tokens, tokens};
}

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

Seen seen_by(int64_t start, int64_t end, const Stretches& keys) {
  const int64_t first = keys.first[start] / 2 * 2, count = keys.last[end - 1] - first;
  return {first, count, (count + 1) / 2 * 2};
}

// Scores of a block become probabilities, exactly zero where nothing is seen; p in bfloat16. With
// `lse` (of all keys, one per query and head) these keys' share of them; else they sum to 1 and the
// logarithm of their sum goes to `lse_out`, -inf where a query sees none.
void softmax_block(float* scores, bf16* p, int64_t start, int64_t end, Seen seen,
                   const Stretches& keys, const Shape& shape, const float* lse, float* lse_out) {
  const float scale = shape.scale;
  for (int64_t i = start; i < end; ++i) {
    float* row = scores + (i - start) * seen.width;
    bf16* to = p + (i - start) * seen.width;
    const int64_t low = keys.first[i] - seen.first, high = keys.last[i] - seen.first;
    float peak = -INFINITY, sum = 0.0f, by = 1.0f;
    if (lse) {
      const float total = lse[i * shape.heads];
#pragma omp simd
      for (int64_t j = low; j < high; ++j) row[j] = exp_of(row[j] * scale - total);
    } else if (low < high) {
      peak = row[low];
#pragma omp simd reduction(max : peak)
      for (int64_t j = low; j < high; ++j) peak = row[j] > peak ? row[j] : peak;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = low; j < high; ++j) {
        row[j] = exp_of((row[j] - peak) * scale);
        sum += row[j];
      }
      by = 1.0f / sum;
    }
    if (lse_out) lse_out[i * shape.heads] = low < high ? peak * scale + std::log(sum) : -INFINITY;
    for (int64_t j = 0; j < low; ++j) row[j] = 0.0f, to[j] = 0;
#pragma omp simd
    for (int64_t j = low; j < high; ++j) {
      row[j] *= by;
      to[j] = narrow(row[j]);
    }
    for (int64_t j = high; j < seen.width; ++j) row[j] = 0.0f, to[j] = 0;
  }
}

void store_row(const float* row, int64_t channels, float scale, bf16* to) {
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) to[c] = narrow(row[c] * scale);
}

void store_row(const float* row, int64_t channels, float scale, float* to) {
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) to[c] = row[c] * scale;
}

template <typename Out>
void forward_task(const bf16* q, const bf16* k, const bf16* v, Out* out, float* lse,
                  const Stretches& keys, const Shape& shape, Room& room) {
  room.fit(keys.keys, shape.channels, false);
  interleave(v, shape.kv_stride(), keys.keys, shape.channels, room.values.data());
  for (int64_t start = 0; start < keys.queries; start += kBlock) {
    const int64_t end = std::min(start + kBlock, keys.queries), count = end - start;
    const Seen seen = seen_by(start, end, keys);
    dot_rows(q + start * shape.q_stride(), shape.q_stride(), count,
             k + seen.first * shape.kv_stride(), shape.kv_stride(), seen.count, shape.channels,
             room.scores.data(), seen.width);
    softmax_block(room.scores.data(), room.p.data(), start, end, seen, keys, shape, nullptr, lse);
    std::fill_n(room.rows.begin(), count * shape.channels, 0.0f);
    add_rows(as_rows(room.p, seen.width), count,
             room.values.data() + seen.first / 2 * shape.channels, seen.width / 2, shape.channels,
             room.rows.data());
    for (int64_t i = 0; i < count; ++i)
      store_row(room.rows.data() + i * shape.channels, shape.channels, 1.0f,
                out + (start + i) * shape.q_stride());
  }
}

// What the gradient of a score is taken off by, and what the scores are taken from; null: both are
// of these keys only and computed again.
struct Whole {
  const float *lse, *slope;  // one per query and head
};

template <typename Out>
void backward_task(const bf16* grad, const bf16* q, const bf16* k, const bf16* v, Whole whole,
                   Out* grad_q, float* grad_k, float* grad_v, const Stretches& keys,
                   const Shape& shape, Room& room) {
  room.fit(keys.keys, shape.channels, true);
  const int64_t channels = shape.channels, q_stride = shape.q_stride(), kv = shape.kv_stride();
  interleave(k, kv, keys.keys, channels, room.keys.data());
  std::fill_n(grad_k, keys.keys * channels, 0.0f);
  std::fill_n(grad_v, keys.keys * channels, 0.0f);
  for (int64_t start = 0; start < keys.queries; start += kBlock) {
    const int64_t end = std::min(start + kBlock, keys.queries), count = end - start;
    const Seen seen = seen_by(start, end, keys);
    float *p = room.scores.data(), *dp = room.grads.data();
    dot_rows(q + start * q_stride, q_stride, count, k + seen.first * kv, kv, seen.count, channels, p,
             seen.width);
    softmax_block(p, room.p.data(), start, end, seen, keys, shape, whole.lse, nullptr);
    dot_rows(grad + start * q_stride, q_stride, count, v + seen.first * kv, kv, seen.count, channels,
             dp, seen.width);
    for (int64_t i = 0; i < count; ++i) {
      const float *p_row = p + i * seen.width, *dp_row = dp + i * seen.width;
      bf16* to = room.ds.data() + i * seen.width;
      float along = 0.0f;
      if (whole.slope) {
        along = whole.slope[(start + i) * shape.heads];
      } else {
#pragma omp simd reduction(+ : along)
        for (int64_t j = 0; j < seen.count; ++j) along += p_row[j] * dp_row[j];
      }
#pragma omp simd
      for (int64_t j = 0; j < seen.count; ++j) to[j] = narrow(p_row[j] * (dp_row[j] - along));
      for (int64_t j = seen.count; j < seen.width; ++j) to[j] = 0;
    }
    std::fill_n(room.rows.begin(), count * channels, 0.0f);
    add_rows(as_rows(room.ds, seen.width), count, room.keys.data() + seen.first / 2 * channels,
             seen.width / 2, channels, room.rows.data());
    for (int64_t i = 0; i < count; ++i)
      store_row(room.rows.data() + i * channels, channels, shape.scale,
                grad_q + (start + i) * q_stride);
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

// Gradients of a key/value head are the sums over its query heads' parts [heads, rows, channels].
template <typename Out>
void sum_parts(const float* parts_k, const float* parts_v, int64_t num_rows, const Shape& shape,
               Out* grad_k, Out* grad_v) {
  const int64_t group = shape.heads / shape.kv_heads, channels = shape.channels;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t kv = 0; kv < shape.kv_heads; ++kv)
      for (int64_t c = 0; c < channels; ++c) {
        float sum_k = 0.0f, sum_v = 0.0f;
        for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
          const int64_t at = (head * num_rows + row) * channels + c;
          sum_k += parts_k[at], sum_v += parts_v[at];
        }
        const int64_t to = (row * shape.kv_heads + kv) * channels;
        sum_k *= shape.scale;
        store_row(&sum_k, 1, 1.0f, grad_k + to + c), store_row(&sum_v, 1, 1.0f, grad_v + to + c);
      }
}

}  // namespace

extern "C" {

// bounds: num_documents + 1 offsets into the rows. channels: a multiple of 32.
void phalanx_attention_forward(const bf16* q, const bf16* k, const bf16* v, bf16* out,
                               const int64_t* bounds, int64_t num_documents, int64_t heads,
                               int64_t kv_heads, int64_t channels, int64_t window, float scale) {
  const Shape shape{heads, kv_heads, channels, scale};
#pragma omp parallel
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t document = 0; document < num_documents; ++document)
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t start = bounds[document], tokens = bounds[document + 1] - start;
        const int64_t kv_at = start * shape.kv_stride() + head / (heads / kv_heads) * channels;
        const int64_t q_at = start * shape.q_stride() + head * channels;
        forward_task(q + q_at, k + kv_at, v + kv_at, out + q_at, nullptr,
                     of_document(tokens, window), shape, room);
      }
  }
}

// parts_k, parts_v: room for every query head's part of the gradients, [heads, rows, channels].
void phalanx_attention_backward(const bf16* grad, const bf16* q, const bf16* k, const bf16* v,
                                bf16* grad_q, bf16* grad_k, bf16* grad_v, float* parts_k,
                                float* parts_v, const int64_t* bounds, int64_t num_documents,
                                int64_t heads, int64_t kv_heads, int64_t channels, int64_t window,
                                float scale) {
  const Shape shape{heads, kv_heads, channels, scale};
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
        backward_task(grad + q_at, q + q_at, k + kv_at, v + kv_at, Whole{nullptr, nullptr},
                      grad_q + q_at, parts_k + part, parts_v + part, of_document(tokens, window),
                      shape, room);
      }
    sum_parts(parts_k, parts_v, num_rows, shape, grad_k, grad_v);
  }
}

// out and lse [queries, heads (, channels)] in float32 over the keys that each query sees.
void phalanx_partial_forward(const bf16* q, const bf16* k, const bf16* v, float* out, float* lse,
                             const int64_t* first, const int64_t* last, int64_t queries,
                             int64_t num_keys, int64_t heads, int64_t kv_heads, int64_t channels,
                             float scale) {
  const Shape shape{heads, kv_heads, channels, scale};
  const Stretches keys{first, last, queries, num_keys};
#pragma omp parallel
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic, 1)
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t kv_at = head / (heads / kv_heads) * channels, q_at = head * channels;
      forward_task(q + q_at, k + kv_at, v + kv_at, out + q_at, lse + head, keys, shape, room);
    }
  }
}

// lse, slope: of the queries over all keys, of which these may be a part; gradients in float32.
void phalanx_partial_backward(const bf16* grad, const bf16* q, const bf16* k, const bf16* v,
                              const float* lse, const float* slope, float* grad_q, float* grad_k,
                              float* grad_v, float* parts_k, float* parts_v, const int64_t* first,
                              const int64_t* last, int64_t queries, int64_t num_keys,
                              int64_t heads, int64_t kv_heads, int64_t channels, float scale) {
  const Shape shape{heads, kv_heads, channels, scale};
  const Stretches keys{first, last, queries, num_keys};
#pragma omp parallel
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic, 1)
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t kv_at = head / (heads / kv_heads) * channels, q_at = head * channels;
      const int64_t part = head * num_keys * channels;
      backward_task(grad + q_at, q + q_at, k + kv_at, v + kv_at, Whole{lse + head, slope + head},
                    grad_q + q_at, parts_k + part, parts_v + part, keys, shape, room);
    }
    sum_parts(parts_k, parts_v, num_keys, shape, grad_k, grad_v);
  }
}

}  // extern "C"

#endif
