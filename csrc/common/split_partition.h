// Which keys a split attends to. Host and device; the Python twin that Triton uses is tested against this file.
//
// A row attends to the first L_main keys of its main index list and the first L_extra of its extra one. Each list is
// cut into blocks of kSplitBlockKeys keys (the last block of a list may be shorter; a block never spans both lists),
// main blocks numbered before extra ones. The n blocks are dealt to S splits in contiguous runs: split s gets n / S
// blocks, one more if s < n % S. Nothing but lengths is read on the device, and the number of splits comes from shapes
// alone, so one captured graph serves all lengths.
//
// Example: L_main = 128, L_extra = 200, S = 4. Blocks 0, 1 are main keys [0, 64) and [64, 128); blocks 2 .. 5 are extra
// keys [0, 64), [64, 128), [128, 192), [192, 200): n = 6, so splits 0 .. 3 get blocks [0, 2), [2, 4), [4, 5), [5, 6).
// With S = 8 splits 0 .. 5 get one block each, splits 6 and 7 are empty: [6, 6).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SGL_DSV4_HOST_DEVICE __host__ __device__
#else
#define SGL_DSV4_HOST_DEVICE
#endif

namespace sgl_dsv4 {

inline constexpr int kSplitBlockKeys = 64;  // the grain; a backend may pass 32 or 16 to the functions below

// Half-open range of blocks.
struct BlockRange {
  int begin;
  int end;
  SGL_DSV4_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
};

// The keys behind one block: entries [begin, end) of the main or of the extra index list.
struct KeyBlock {
  bool extra;
  int begin;
  int end;
};

// What one row attends to, in keys and in blocks.
struct RowBlocks {
  int main_keys;    // L_main, in [0, K]
  int extra_keys;   // L_extra, in [0, extra K]
  int main_blocks;  // blocks [0, main_blocks) are main keys
  int blocks;       // blocks [main_blocks, blocks) are extra keys
};

SGL_DSV4_HOST_DEVICE constexpr int clamp_length(int length, int capacity) {
  return length < 0 ? 0 : (length > capacity ? capacity : length);
}

// `length` and `extra_length` are what the caller passed, unclamped; K = main_capacity, extra K = extra_capacity.
SGL_DSV4_HOST_DEVICE constexpr RowBlocks row_blocks(int length, int main_capacity, int extra_length, int extra_capacity,
                                                    int block_keys = kSplitBlockKeys) {
  const int main_keys = clamp_length(length, main_capacity);
  const int extra_keys = clamp_length(extra_length, extra_capacity);
  const int main_blocks = main_keys / block_keys + (main_keys % block_keys != 0);
  const int extra_blocks = extra_keys / block_keys + (extra_keys % block_keys != 0);
  return {main_keys, extra_keys, main_blocks, main_blocks + extra_blocks};
}

// Blocks of split `split` (0 <= split < num_splits) of a row of `blocks` blocks. `each` = blocks / num_splits.
SGL_DSV4_HOST_DEVICE constexpr BlockRange split_range(int blocks, int split, int num_splits, int each) {
  const int longer = blocks - each * num_splits;  // this many leading splits get one block more
  const int begin = split * each + (split < longer ? split : longer);
  return {begin, begin + each + (split < longer ? 1 : 0)};
}
SGL_DSV4_HOST_DEVICE constexpr BlockRange split_range(int blocks, int split, int num_splits) {
  return split_range(blocks, split, num_splits, blocks / num_splits);
}

// Keys of block `block` (0 <= block < row.blocks).
SGL_DSV4_HOST_DEVICE constexpr KeyBlock key_block(const RowBlocks& row, int block, int block_keys = kSplitBlockKeys) {
  const bool extra = block >= row.main_blocks;
  const int keys = extra ? row.extra_keys : row.main_keys;
  const int begin = (extra ? block - row.main_blocks : block) * block_keys;
  return {extra, begin, keys - begin < block_keys ? keys : begin + block_keys};
}

// The example above.
namespace split_partition_example {
constexpr bool is(BlockRange r, int begin, int end) {
  return r.begin == begin && r.end == end;
}
constexpr bool is(KeyBlock k, bool extra, int begin, int end) {
  return k.extra == extra && k.begin == begin && k.end == end;
}
constexpr RowBlocks kRow = row_blocks(128, 128, 200, 512);
static_assert(kRow.main_blocks == 2 && kRow.blocks == 6);
static_assert(is(split_range(6, 0, 4), 0, 2) && is(split_range(6, 1, 4), 2, 4));
static_assert(is(split_range(6, 2, 4), 4, 5) && is(split_range(6, 3, 4), 5, 6));
static_assert(is(split_range(6, 5, 8), 5, 6) && is(split_range(6, 6, 8), 6, 6) && split_range(6, 7, 8).empty());
static_assert(is(key_block(kRow, 1), false, 64, 128) && is(key_block(kRow, 2), true, 0, 64));
static_assert(is(key_block(kRow, 5), true, 192, 200));
// Lengths are clamped, and nothing to attend to leaves every split empty.
static_assert(row_blocks(-1, 128, 9999, 200).main_blocks == 0 && row_blocks(-1, 128, 9999, 200).blocks == 4);
static_assert(split_range(0, 0, 4).empty() && split_range(0, 3, 4).empty());
}  // namespace split_partition_example

}  // namespace sgl_dsv4
