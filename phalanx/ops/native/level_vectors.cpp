// Levels without products of bfloat16: AVX2, and any processor (PHALANX_VECTORS names which).
// x is kept in float32.

#include "level.h"

namespace {

#ifdef __AVX2__
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

std::int64_t columns_of(std::int64_t rows) { return (rows + 15) / 16 * 16; }
void products(const bf16*, std::int64_t, std::int64_t, std::int64_t, const void*, std::int64_t,
              float*);
void pack(const bf16*, std::int64_t, std::int64_t, void*);

inline void put(float value, bf16& to) { to = narrow(value); }
inline void put(float value, float& to) { to = value; }

template <typename Out>
void spread(const float* out, std::int64_t width, std::int64_t rows, std::int64_t count, Out* y,
            std::int64_t stride) {
  for (std::int64_t s = 0; s < rows; ++s)
    for (std::int64_t i = 0; i < count; ++i) put(out[i * width + s], y[s * stride + i]);
}

void enter() {}
void leave() {}

std::int64_t padded(std::int64_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

std::int64_t packed_bytes(std::int64_t rows, std::int64_t columns) {
  return 4 * rows * padded(columns);
}

}  // namespace

#include "level_body.h"

namespace {

void pack(const bf16* x, int64_t rows, int64_t columns, void* packed) {
  const int64_t width = padded(columns);
  for (int64_t s = 0; s < rows; ++s) {
    float* to = static_cast<float*>(packed) + s * width;
    for (int64_t c = 0; c < columns; ++c) to[c] = widen(x[s * columns + c]);
    for (int64_t c = columns; c < width; ++c) to[c] = 0.0f;
  }
}

float sum_of(Floats value) {
  float parts[kLanes];
  stored(value, parts);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) parts[i] += parts[i + step];
  return parts[0];
}

// Products of two rows of w with kX of x; the last columns of w come from zero-filled copies.
template <int kX>
void dots(const bf16* const* w, const bf16* const* tails, int64_t columns, const float* x,
          float* const* out) {
  Floats sums[2][kX];
  for (auto& each : sums)
    for (auto& one : each) one = Floats{};
  const int64_t width = padded(columns), whole = columns / kLanes * kLanes;
  for (int64_t c = 0; c < width; c += kLanes) {
    const Floats a = widened(c < whole ? w[0] + c : tails[0]);
    const Floats b = widened(c < whole ? w[1] + c : tails[1]);
    for (int s = 0; s < kX; ++s) {
      const Floats column = loaded(x + s * width + c);
      sums[0][s] += a * column;
      sums[1][s] += b * column;
    }
  }
  for (int i = 0; i < 2; ++i)
    for (int s = 0; s < kX; ++s) out[i][s] = sum_of(sums[i][s]);
}

void products(const bf16* w, int64_t stride, int64_t count, int64_t columns, const void* packed,
              int64_t rows, float* out) {
  const float* x = static_cast<const float*>(packed);
  const int64_t width = columns_of(rows), whole = columns / kLanes * kLanes;
  for (int64_t i = 0; i < count; i += 2) {
    const bf16* two[2];
    float* to[2];
    bf16 ends[2][kLanes] = {};
    const bf16* tails[2] = {ends[0], ends[1]};
    for (int64_t y = 0; y < 2; ++y) {
      const int64_t at = least(i + y, count - 1);
      two[y] = w + at * stride;
      to[y] = out + at * width;
      for (int64_t c = whole; c < columns; ++c) ends[y][c - whole] = two[y][c];
    }
    for (int64_t s = 0; s < rows;) {
      const float* from = x + s * padded(columns);
      float* const at[2] = {to[0] + s, to[1] + s};
      if (s + 4 <= rows) {
        dots<4>(two, tails, columns, from, at);
        s += 4;
      } else {
        dots<1>(two, tails, columns, from, at);
        s += 1;
      }
    }
  }
}

}  // namespace

#ifdef __AVX2__
PHALANX_LEVEL(phalanx_level_avx2, "avx2")
#else
PHALANX_LEVEL(phalanx_level_plain, "plain")
#endif
