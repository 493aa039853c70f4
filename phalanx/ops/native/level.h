// What one level of processor features offers to serving.cpp: serial parts of each kernel.
//
// A level is a file compiled with flags of its own; serving.cpp, compiled for any processor, shares
// the parts out to threads and picks the best level that this processor has. Code of a level must
// not instantiate templates of the standard library: the linker might pick that copy for all.

#pragma once

#include <cstdint>

#include "numbers.h"

constexpr std::int64_t kMostRows = 64;       // of x in one product
constexpr std::int64_t kBlockRows = 32;      // rows of a matrix whose products are made together
constexpr std::int64_t kBlockTokens = 16;    // of the paged cache
constexpr std::int64_t kSplitTokens = 256;   // of one part of an attention row

// A matrix [rows, columns] of bfloat16 in the order of torch.
struct Matrix {
  const bf16* at;
  std::int64_t rows, columns;
};

// One query row's heads that share a kv head, over a part of the tokens that it sees.
struct AttentionPart {
  const bf16* queries;          // [group, channels]
  const bf16 *keys, *values;    // pools [block, kv_heads, token, channels], moved on to the kv head
  std::int64_t block_stride;    // elements from a block to the next
  const std::int64_t* blocks;   // of the row
  std::int64_t first, last;     // tokens of the part, counted from the first block's first
  std::int64_t group, channels;
  float scale, cap;             // cap 0: none
};

struct Level {
  const char* name;
  // Prepare and clean up a thread.
  void (*enter)();
  void (*leave)();
  std::int64_t (*packed_bytes)(std::int64_t rows, std::int64_t columns);
  // x [rows, columns] in the form that products read, 64-byte aligned.
  void (*pack)(const bf16* x, std::int64_t rows, std::int64_t columns, void* packed);
  // y[s, f] of the rows first .. last - 1 of w; first is a multiple of kBlockRows.
  void (*linear)(Matrix w, const void* x, std::int64_t rows, std::int64_t first, std::int64_t last,
                 bf16* y);
  // The same without rounding.
  void (*linear_wide)(Matrix w, const void* x, std::int64_t rows, std::int64_t first,
                      std::int64_t last, float* y);
  // The largest products of each x with the rows first .. last - 1 of w: values and places
  // [rows, count], falling, equal ones in order of place; count <= last - first.
  void (*best)(Matrix w, const void* x, std::int64_t rows, std::int64_t first, std::int64_t last,
               std::int64_t count, float* values, std::int64_t* places);
  // Per head: sums [group, channels] of values, weighted by exp(score - peak); peaks and sums of
  // weights [group] each. `packed` has room for `group` rows.
  void (*attend)(const AttentionPart& part, void* packed, float* weighted, float* peaks,
                 float* sums);
};
