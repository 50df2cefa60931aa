// Which part of the problem a block has.
#pragma once

#include <cmath>

#include "common/ptx.cuh"
#include "decode/sm90/roles.h"
#include "decode/sm90/shared_memory.h"
#include "decode/sm90/sparse_decode.h"

namespace sgl_dsv4::sm90 {

static_assert((kTileThreads & (kTileThreads - 1)) == 0);

inline constexpr float kMinusInfinity = -INFINITY;

// 64 heads a block.
__device__ __forceinline__ int my_warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}
// threadIdx.x, asked for wherever it is used; the compiler is to know that it is not negative.
__device__ __forceinline__ int tile_thread() {
  return ptx::thread_of_block() & (kTileThreads - 1);
}
__device__ __forceinline__ bool gathers(int warpgroup) {
  return warpgroup == 2 || warpgroup == 3;
}

enum NamedBarrier : int { kConsumersMeet = 1, kRoleEnds = 2 };  // kRoleEnds: one a warpgroup
// 8, 16 or 32 heads a block: kConsumersMeet, kEmpty one a stage. 8: kScoresFull one a buffer. 16, 32: kScoresFull,
// kScoresEmpty, kQueryStored, kWeightsEmpty one a buffer; several parts a block: those of one role meet.
enum RawBarrier : int {
  kScoresFull = 2,
  kScoresEmpty = 3,
  kEmpty = 4,
  kWeightsEmpty = 8,
  kQueryStored = 10,
  kScoreWarpsMeet = 11,  // 8 heads: kAttendWarpsMeet
  kAttendWarpsMeet = kScoreWarpsMeet,
  kValueWarpsMeet = 12,  // one a warpgroup
};

// Rows, heads and split of a block.
struct Part {
  int64_t token;
  int split;
  bool whole;  // all of the row's keys, its outputs are written; of rows that are cut alone
  int first_head;
  int heads;  // at least 1
};

// The same, and its tiles.
struct Work : Part {
  RowBlocks row;
  BlockRange range;
};

// `at`: which part of the launch; neighbours have other heads, then splits, then rows. kCut: whole rows come first,
// then splits of the others. `block_heads`: heads a block, but for the last of a row.
template <bool kCut>
__device__ __forceinline__ Part part_at(const DecodeParams& p, int block_heads, uint32_t at) {
  const uint32_t num_whole = kCut ? static_cast<uint32_t>(p.num_whole) : 0;
  const uint32_t row_or_split = divide(at, p.groups);
  const uint32_t group = at - row_or_split * static_cast<uint32_t>(p.groups.divisor);
  Part part;
  part.whole = kCut && row_or_split < num_whole;
  const uint32_t split = part.whole ? 0 : row_or_split - num_whole;
  const uint32_t row = divide(split, p.splits);
  part.token = part.whole ? row_or_split : num_whole + row;
  part.split = static_cast<int>(split - row * static_cast<uint32_t>(p.splits.divisor));
  part.first_head = static_cast<int>(group) * block_heads;
  part.heads = min(block_heads, p.num_heads - part.first_head);
  return part;
}

// 64 heads a block ask again at the end: only one role keeps its results.
__device__ __forceinline__ Part my_part(const DecodeParams& p, int block_heads) {
  return part_at<false>(p, block_heads, ptx::ctaid_x());
}

__device__ __forceinline__ BlockRange my_tiles(const DecodeParams& p, const RowBlocks& row, const Part& part) {
  if (part.whole) return {0, row.blocks};
  const int each = static_cast<int>(divide(static_cast<uint32_t>(row.blocks), p.splits));
  return split_range(row.blocks, part.split, p.num_splits, each);
}

// ---- the first loads ----

// 0, and no access, if there is no address.
__device__ __forceinline__ int ld_int(const int32_t* address) {
  return static_cast<int>(ptx::ld_global_if(address != nullptr, address, 0));
}

// Where a row's lengths lie; nullptr: the width counts.
struct Lengths {
  const int32_t* at[2];
};

__device__ __forceinline__ Lengths find_lengths(const DecodeParams& p, const Part& part) {
  Lengths lengths;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Source& source = p.source[i];
    const bool any = source.length != nullptr && source.width > 0;
    lengths.at[i] = any ? source.length + part.token * source.stride_length : nullptr;
  }
  return lengths;
}

struct RowLengths {
  int main, extra;
};

// Both are on their way before one is looked at.
__device__ __forceinline__ RowLengths load(const Lengths& lengths) {
  const int main = ld_int(lengths.at[0]);
  return {main, ld_int(lengths.at[1])};
}

__device__ __forceinline__ Work my_work(const DecodeParams& p, const Part& part, const Lengths& at,
                                        const RowLengths& lengths) {
  Work w;
  static_cast<Part&>(w) = part;
  const int width = p.source[0].width, extra_width = p.source[1].width;
  w.row = row_blocks(at.at[0] != nullptr ? lengths.main : width, width,
                     at.at[1] != nullptr ? lengths.extra : extra_width, extra_width);
  w.range = my_tiles(p, w.row, part);
  return w;
}

}  // namespace sgl_dsv4::sm90
