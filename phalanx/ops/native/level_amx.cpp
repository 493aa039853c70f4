// The level of AMX tiles of bfloat16: rows of w are loaded as they lie, x is packed.
//
// x in tiles of 32 columns and 16 rows, zeros where there are none: [column tile][row tile][pair of
// columns, 16][row, 16][2]. A product always runs over whole tiles, so a row's result depends
// neither on how many rows stand beside it nor on which.

#include <immintrin.h>

#include "level.h"
#include "turned.h"

namespace {

constexpr int kLanes = 16;
constexpr std::int64_t kTileRows = 16, kTileColumns = 32, kTileSize = 512;

std::int64_t columns_of(std::int64_t rows) { return (rows + 15) / 16 * 16; }
void products(const bf16*, std::int64_t, std::int64_t, std::int64_t, const void*, std::int64_t,
              float*);
void pack(const bf16*, std::int64_t, std::int64_t, void*);

std::int64_t tiles_of(std::int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

std::int64_t packed_bytes(std::int64_t rows, std::int64_t columns) {
  return 2 * kTileSize * tiles_of(columns) * (columns_of(rows) / kTileRows);
}

// The operand of LDTILECFG; all eight tiles are whole ones.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void enter() {
  static constexpr TileConfig config;
  _tile_loadconfig(&config);
}

void leave() { _tile_release(); }

}  // namespace

#include "level_body.h"

namespace {

void pack(const bf16* x, int64_t rows, int64_t columns, void* packed) {
  const int64_t row_tiles = columns_of(rows) / kTileRows;
  float* to = static_cast<float*>(packed);  // words of two columns each
  for (int64_t c = 0; c < columns; c += kTileColumns)
    for (int64_t tile = 0; tile < row_tiles; ++tile, to += kTileSize / 2) {
      const int64_t left = columns - c;
      const __mmask32 which = left >= kTileColumns ? ~0u : (1u << left) - 1u;
      __m512 words[kTileRows];
      for (int64_t s = 0; s < kTileRows; ++s) {
        const int64_t row = tile * kTileRows + s;
        words[s] = row >= rows ? _mm512_setzero_ps()
                               : _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(
                                     which, x + row * columns + c));
      }
      turn(words);
      for (int64_t pair = 0; pair < 16; ++pair) _mm512_storeu_ps(to + 16 * pair, words[pair]);
    }
}

// Where the rows of a tile of w lie.
struct TileRows {
  const bf16* at;
  int64_t stride_bytes;
};

// The tile of w with these rows and columns left; one that is not whole is copied, zeros beyond.
inline TileRows tile_at(const bf16* w, int64_t stride, int64_t rows, int64_t columns, bf16* room) {
  if (rows >= kTileRows && columns >= kTileColumns) return {w, 2 * stride};
  for (int64_t i = 0; i < kTileRows; ++i)
    for (int64_t c = 0; c < kTileColumns; ++c)
      room[i * kTileColumns + c] = i < rows && c < columns ? w[i * stride + c] : 0;
  asm volatile("" ::: "memory");  // tile loads don't tell the compiler what they read
  return {room, 2 * kTileColumns};
}

// A block of w, `count` rows of it real, with one or two row tiles of x.
struct Block {
  const bf16* w;
  int64_t stride, count, columns;
  const bf16* x;
  int64_t x_step;  // elements of x from a column tile to the next
};

// What the loop reads kAhead column tiles later: of these rows, or of the next block.
inline void prefetch(const bf16* w, const Block& block, int64_t left) {
  constexpr int64_t kAhead = 4 * kTileColumns;
  w += left > kAhead ? kAhead : kBlockRows * block.stride + kAhead - block.columns;
  for (int64_t i = 0; i < kBlockRows; ++i)
    _mm_prefetch(reinterpret_cast<const char*>(w + i * block.stride), _MM_HINT_T0);
}

// Tiles: 0..3 sums, 4 and 5 of w, 6 and 7 of x.
template <bool kLower, bool kSecond>
void multiply(const Block& block, float* out, int64_t width) {
  alignas(64) bf16 room[2][kTileSize];
  const bf16 *w = block.w, *x = block.x;
  _tile_zero(0);
  if constexpr (kSecond) _tile_zero(1);
  if constexpr (kLower) _tile_zero(2);
  if constexpr (kLower && kSecond) _tile_zero(3);
  for (int64_t left = block.columns; left > 0; left -= kTileColumns) {
    const TileRows upper = tile_at(w, block.stride, block.count, left, room[0]);
    _tile_loadd(6, x, 64);
    _tile_loadd(4, upper.at, upper.stride_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kSecond) {
      _tile_loadd(7, x + kTileSize, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kLower) {
      const TileRows lower = tile_at(w + kTileRows * block.stride, block.stride,
                                     block.count - kTileRows, left, room[1]);
      _tile_loadd(5, lower.at, lower.stride_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kSecond) _tile_dpbf16ps(3, 5, 7);
      prefetch(w, block, left);
    }
    w += kTileColumns, x += block.x_step;
  }
  _tile_stored(0, out, 4 * width);
  if constexpr (kSecond) _tile_stored(1, out + kTileRows, 4 * width);
  if constexpr (kLower) _tile_stored(2, out + kTileRows * width, 4 * width);
  if constexpr (kLower && kSecond)
    _tile_stored(3, out + kTileRows * width + kTileRows, 4 * width);
}

void products(const bf16* w, int64_t stride, int64_t count, int64_t columns, const void* packed,
              int64_t rows, float* out) {
  const int64_t width = columns_of(rows), row_tiles = width / kTileRows;
  asm volatile("" ::: "memory");
  for (int64_t tile = 0; tile < row_tiles; tile += 2) {
    const bf16* x = static_cast<const bf16*>(packed) + tile * kTileSize;
    const Block block{w, stride, count, columns, x, row_tiles * kTileSize};
    const bool second = tile + 1 < row_tiles;
    float* to = out + tile * kTileRows;
    if (count > kTileRows)
      second ? multiply<true, true>(block, to, width) : multiply<true, false>(block, to, width);
    else
      second ? multiply<false, true>(block, to, width) : multiply<false, false>(block, to, width);
  }
}

}  // namespace

PHALANX_LEVEL(phalanx_level_amx_bf16, "amx_bf16")
