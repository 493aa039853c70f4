// Kernels of serving: shared out to threads here, computed by a level chosen while running.
//
// How work is cut depends on sizes only, so results do not depend on the number of threads.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "level.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Weak: a compiler that doesn't know a level's instructions leaves it out.
extern "C" {
__attribute__((weak)) const Level* phalanx_level_amx_bf16();
__attribute__((weak)) const Level* phalanx_level_avx512_bf16();
__attribute__((weak)) const Level* phalanx_level_avx2();
const Level* phalanx_level_plain();
}

namespace {

using std::int64_t;

#if defined(__x86_64__) && defined(__linux__)
// Tiles must be asked for once per process; a kernel or a container may refuse.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// CPUID leaf 7: the names of these features are younger than some compilers.
bool has_amx_bf16() {
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (d >> 22 & 1) && (d >> 24 & 1) && has_avx512_bf16() && may_use_tiles();
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
bool has_amx_bf16() { return false; }
bool has_avx512_bf16() { return false; }
bool has_avx2() { return false; }
#endif

// Best first.
const std::vector<const Level*>& levels() {
  static const std::vector<const Level*> found = [] {
    std::vector<const Level*> all;
    if (phalanx_level_amx_bf16 && has_amx_bf16()) all.push_back(phalanx_level_amx_bf16());
    if (phalanx_level_avx512_bf16 && has_avx512_bf16()) all.push_back(phalanx_level_avx512_bf16());
    if (phalanx_level_avx2 && has_avx2()) all.push_back(phalanx_level_avx2());
    all.push_back(phalanx_level_plain());
    return all;
  }();
  return found;
}

const Level* chosen = nullptr;

const Level& level() { return chosen ? *chosen : *levels().front(); }

// Memory of a thread that grows and stays, 64-byte aligned.
class Room {
 public:
  ~Room() { std::free(at_); }

  template <typename T>
  T* of(int64_t count) {
    const std::size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(at_);
      at_ = std::aligned_alloc(64, bytes);
      size_ = bytes;
    }
    return static_cast<T*>(at_);
  }

 private:
  void* at_ = nullptr;
  std::size_t size_ = 0;
};

constexpr int64_t kSerialBytes = 1 << 15;  // smaller matrices are not worth waking threads
constexpr int64_t kPartBytes = 1 << 18;    // of a matrix, which a thread takes at once
constexpr int64_t kPartTokens = 1 << 13;   // of a vocabulary

struct Range {
  int64_t low, high;
};

struct Candidate {
  float value;
  int64_t place;
};

bool goes_before(const Candidate& a, const Candidate& b) {
  const float x = std::isnan(a.value) ? INFINITY : a.value;
  const float y = std::isnan(b.value) ? INFINITY : b.value;
  return x > y || (x == y && a.place < b.place);
}

// y [rows, outputs] = x w^T, cut into parts of about kPartBytes of w.
template <typename Out>
void product(const bf16* x, const bf16* w, Out* y, int64_t rows, int64_t outputs, int64_t columns,
             void (*Level::*part)(Matrix, const void*, int64_t, int64_t, int64_t, Out*)) {
  static thread_local Room room;
  const Level& by = level();
  const Matrix matrix{w, outputs, columns};
  void* packed = room.of<char>(by.packed_bytes(rows, columns));
  by.pack(x, rows, columns, packed);
  const int64_t step =
      (std::max(kPartBytes / (2 * columns), int64_t{1}) + kBlockRows - 1) / kBlockRows * kBlockRows;
#pragma omp parallel if (2 * outputs * columns > kSerialBytes)
  {
    by.enter();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t first = 0; first < outputs; first += step)
      (by.*part)(matrix, packed, rows, first, std::min(first + step, outputs), y);
    by.leave();
  }
}

// A head's parts, each (peaks, sums of weights, weighted values) of `group` heads and `step` floats
// from the one before; `at` is the first one's peak.
void join(const float* at, int64_t group, int64_t head, int64_t channels, int64_t count,
          int64_t step, bf16* to) {
  constexpr int64_t kStrip = 64;
  float peak = -INFINITY, sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) peak = std::max(peak, at[i * step]);
  for (int64_t i = 0; i < count; ++i) sum += at[i * step + group] * std::exp(at[i * step] - peak);
  const float* values = at - head + 2 * group + head * channels;
  for (int64_t from = 0; from < channels; from += kStrip) {
    const int64_t width = std::min(kStrip, channels - from);
    float strip[kStrip] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float by = std::exp(at[i * step] - peak);
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) strip[c] += by * values[i * step + from + c];
    }
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) to[from + c] = narrow(strip[c] / sum);
  }
}

}  // namespace

extern "C" {

int64_t phalanx_num_levels() { return static_cast<int64_t>(levels().size()); }
const char* phalanx_level_name(int64_t at) { return levels()[at]->name; }
// -1: the best one.
void phalanx_choose_level(int64_t at) { chosen = at < 0 ? nullptr : levels()[at]; }

// y [rows, outputs] = x [rows, columns] w [outputs, columns]^T for at most kMostRows rows.
void phalanx_packed_linear(const bf16* x, const bf16* w, bf16* y, int64_t rows, int64_t outputs,
                           int64_t columns) {
  product(x, w, y, rows, outputs, columns, &Level::linear);
}

// The same without rounding.
void phalanx_packed_linear_wide(const bf16* x, const bf16* w, float* y, int64_t rows,
                                int64_t outputs, int64_t columns) {
  product(x, w, y, rows, outputs, columns, &Level::linear_wide);
}

// The `count` largest of x w^T per row in falling order, and their places in w.
void phalanx_vocabulary_best(const bf16* x, const bf16* w, float* values, int64_t* places,
                             int64_t rows, int64_t tokens, int64_t columns, int64_t count) {
  static thread_local Room room;
  static thread_local std::vector<float> some_values;
  static thread_local std::vector<int64_t> some_places;
  const Level& by = level();
  const Matrix matrix{w, tokens, columns};
  void* packed = room.of<char>(by.packed_bytes(rows, columns));
  by.pack(x, rows, columns, packed);
  const int64_t parts = (tokens + kPartTokens - 1) / kPartTokens, stride = rows * count;
  some_values.resize(parts * stride), some_places.resize(parts * stride);
  float* all_values = some_values.data();
  int64_t* all_places = some_places.data();
#pragma omp parallel if (2 * tokens * columns > kSerialBytes)
  {
    by.enter();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = part * kPartTokens, last = std::min(first + kPartTokens, tokens);
      by.best(matrix, packed, rows, first, last, std::min(count, last - first),
              all_values + part * stride, all_places + part * stride);
    }
    by.leave();
  }
  std::vector<Candidate> row;
  for (int64_t s = 0; s < rows; ++s) {
    row.clear();
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t held = std::min(count, tokens - part * kPartTokens);
      for (int64_t i = 0; i < std::min(held, kPartTokens); ++i) {
        const int64_t at = part * stride + s * held + i;
        row.push_back({all_values[at], all_places[at]});
      }
    }
    std::partial_sort(row.begin(), row.begin() + count, row.end(), goes_before);
    for (int64_t i = 0; i < count; ++i) {
      values[s * count + i] = row[i].value;
      places[s * count + i] = row[i].place;
    }
  }
}

// Attention of one query row per request, out [requests, kv_heads * group, channels], over pools
// [block, kv_head, token, channel]. blocks [requests, num_blocks]; each request sees the tokens
// seen[r].low .. seen[r].high - 1 counted from its first block's first token.
void phalanx_paged_decode(const bf16* q, const bf16* keys, const bf16* values,
                          const int64_t* blocks, const Range* seen, bf16* out, int64_t requests,
                          int64_t num_blocks, int64_t kv_heads, int64_t group, int64_t channels,
                          float scale, float cap) {
  static thread_local std::vector<int64_t> ends;  // of the parts of each request
  static thread_local Room parts_room;
  const Level& by = level();
  ends.assign(1, 0);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t first = seen[r].low / kSplitTokens, last = (seen[r].high - 1) / kSplitTokens;
    ends.push_back(ends.back() + last - first + 1);
  }
  const int64_t* end = ends.data();
  const int64_t tasks = ends.back() * kv_heads;
  const int64_t head = kBlockTokens * channels, part_size = group * (channels + 2);
  float* parts = parts_room.of<float>(tasks * part_size);
#pragma omp parallel if (tasks > 1)
  {
    static thread_local Room room;
    void* packed = room.of<char>(by.packed_bytes(group, channels));
    by.enter();
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t number = task / kv_heads, kv = task % kv_heads;
      const int64_t r = std::upper_bound(end, end + requests + 1, number) - end - 1;
      const int64_t split = seen[r].low / kSplitTokens + number - end[r];
      float* to = parts + task * part_size;
      const AttentionPart part{q + (r * kv_heads + kv) * group * channels,
                               keys + kv * head,
                               values + kv * head,
                               kv_heads * head,
                               blocks + r * num_blocks,
                               std::max(seen[r].low, split * kSplitTokens),
                               std::min(seen[r].high, (split + 1) * kSplitTokens),
                               group,
                               channels,
                               scale,
                               cap};
      by.attend(part, packed, to + 2 * group, to, to + group);
    }
    by.leave();
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < requests * kv_heads * group; ++task) {
      const int64_t r = task / (kv_heads * group), kv = task / group % kv_heads, g = task % group;
      const float* first = parts + (end[r] * kv_heads + kv) * part_size;
      const int64_t count = end[r + 1] - end[r], step = kv_heads * part_size;
      join(first + g, group, g, channels, count, step, out + task * channels);
    }
  }
}

}  // extern "C"
