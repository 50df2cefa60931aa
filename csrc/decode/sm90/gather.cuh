// The gathering warpgroups: index lists -> rows of the cache -> bf16 tiles in shared memory.
//
// A warp has 8 keys of every tile, 4 lanes a key. One load instruction takes 64 consecutive bytes of each of its 8
// rows: nine of them are a row, the first seven one scale group each, the last two the RoPE part. The registers of a
// load are reused at once: as soon as chunk j of this tile has been read out of them, chunk j of the next tile is on
// its way into them, so a whole tile is in flight all the time.
#pragma once

#include <cstdint>

#include "common/cache_layout.h"
#include "common/ptx.cuh"
#include "decode/sm90/dequant.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

inline constexpr int kLanesPerKey = 4;
inline constexpr int kKeysPerWarp = 32 / kLanesPerKey;
inline constexpr int kChunkBytes = kLanesPerKey * 16;  // of a row, a load instruction
inline constexpr int kChunks = V4Layout::kDataBytes / kChunkBytes;
static_assert(kChunks == 9 && kChunkBytes == kQuantGroup && kKeysPerWarp * (kGatherThreads / 32) == kTileKeys);

// PTX ISA, "ld.global": 16 and 8 bytes; zeros, and no access, if not wanted. L1 is left alone: a row is used once. Not
// ".nc": the assembler moves such loads across __syncwarp, see gather().
__device__ __forceinline__ uint4 ld_row_if(bool wanted, const uint8_t* address) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(static_cast<int>(wanted))
      : "memory");
  return v;
}
__device__ __forceinline__ uint2 ld_scales_if(bool wanted, const uint8_t* address) {
  uint2 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@p ld.global.v2.b32 {%0, %1}, [%2];\n"
      "}\n"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(address), "r"(static_cast<int>(wanted))
      : "memory");
  return v;
}

// A key's bytes in the cache.
struct Row {
  const uint8_t* data;
  const uint8_t* scales;
  bool attended;
};

// Index of key `key` of tile `tile`; -1 past the end of the list or of the split.
__device__ __forceinline__ int load_slot(const DecodeParams& p, const Work& w, int tile, int key) {
  if (tile >= w.range.end) return -1;
  const KeyBlock keys = key_block(w.row, tile);
  const Source& source = p.source[keys.extra];
  const int at = keys.begin + key;
  return at < keys.end ? source.indices[w.token * source.stride_indices + at] : -1;
}

// A thread's key in the block's first two tiles if all lengths are full. Which rows these are is asked for beside the
// lengths, and the first one is read, before the lengths are known; it is not attended to if they say otherwise.
struct Guess {
  KeyBlock keys[2];
  const int32_t* at[2];  // where the indices lie; nullptr: there is no such key
};

__device__ __forceinline__ int gather_key() {
  return (static_cast<int>(threadIdx.x) - kConsumerThreads) / kLanesPerKey;
}

__device__ __forceinline__ Guess guess_keys(const DecodeParams& p, const Part& part) {
  const int width = p.source[0].width, extra_width = p.source[1].width;
  const RowBlocks row = row_blocks(width, width, extra_width, extra_width);
  const BlockRange range = my_tiles(p, row, part.split);
  Guess guess;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    guess.keys[i] = key_block(row, range.begin + i);
    const int at = guess.keys[i].begin + gather_key();
    const Source& source = p.source[guess.keys[i].extra];
    const bool any = range.begin + i < range.end && at < guess.keys[i].end;
    guess.at[i] = any ? source.indices + part.token * source.stride_indices + at : nullptr;
  }
  return guess;
}

// Index of key `key` of the block's first (i = 0) or second tile; `guessed`: what lies where the guess said.
__device__ __forceinline__ int first_slot(const DecodeParams& p, const Work& w, const Guess& guess, int i, int guessed,
                                          int key) {
  const int tile = w.range.begin + i;
  if (tile >= w.range.end) return -1;
  const KeyBlock keys = key_block(w.row, tile);
  if (keys.extra != guess.keys[i].extra || keys.begin != guess.keys[i].begin) return load_slot(p, w, tile, key);
  return keys.begin + key < keys.end ? guessed : -1;
}

__device__ __forceinline__ Row locate(const Source& source, int slot) {
  const bool attended = static_cast<uint32_t>(slot) < source.num_slots;
  const uint32_t page = divide(static_cast<uint32_t>(slot), source.page_size);
  const uint32_t place = static_cast<uint32_t>(slot) - page * static_cast<uint32_t>(source.page_size.divisor);
  const uint8_t* start = source.cache + page * source.stride_page;
  return {start + static_cast<uint64_t>(place) * V4Layout::kDataBytes,
          start + source.scales_in_page + static_cast<uint64_t>(place) * V4Layout::kScaleBytes, attended};
}

__device__ __forceinline__ uint32_t scale_byte(uint2 scales, int group) {
  return (group < 4 ? scales.x : scales.y) >> (group % 4 * 8) & 0xffu;
}

// Multiplies 16 bytes of this thread's own making.
__device__ __forceinline__ void multiply_shared(uint32_t address, uint32_t factor) {
  const uint4 v = ptx::ld_shared(address);
  ptx::st_shared(address, times(v, factor));
}

// Returns whether the block has keys.
template <typename Shared>
__device__ __forceinline__ bool gather(const DecodeParams& p, const Part& block, const Lengths& lengths_at,
                                       const Guess& guess, Shared& shared) {
  const int first_guessed = ld_int(guess.at[0]);
  const RowLengths lengths = load(lengths_at);
  const int second_guessed = ld_int(guess.at[1]);

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = (static_cast<int>(threadIdx.x) - kConsumerThreads) / 32;
  const int part = lane % kLanesPerKey;
  const int key = gather_key();

  // Within a channel block a lane fills two neighbouring 16-byte chunks from its 16 codes, and one from each load of
  // the RoPE part. Odd rows take the two halves of the RoPE part in the other order, so that the 8 lanes of a store
  // phase, an even and an odd row, hit all banks.
  const int swizzle = key % 8;
  const int odd = key % 2;
  const int tile_row = key * kRowBytes;
  const uint32_t code_at = static_cast<uint32_t>(tile_row + ((2 * part) ^ swizzle) * 16);
  const uint32_t rope_at = static_cast<uint32_t>(tile_row + ((part + 4 * odd) ^ swizzle) * 16);
  const int in_row = part * 16;
  const int rope_in_row = V4Layout::kRopeOffset + odd * kChunkBytes + in_row;
  const int rope_step = kChunkBytes - 2 * odd * kChunkBytes;

  const auto load_rope = [&](const Row& row, int half) {
    return ld_row_if(row.attended, row.data + rope_in_row + half * rope_step);
  };

  // First tile: as guessed, then as the lengths say.
  const int guessed[2] = {guess.at[0] != nullptr ? first_guessed : -1, guess.at[1] != nullptr ? second_guessed : -1};
  uint4 raw[kChunks];
  uint2 scales;
  const auto load_row = [&](const Row& row) {
    scales = ld_scales_if(row.attended, row.scales);
#pragma unroll
    for (int j = 0; j < kNumScales; ++j) raw[j] = ld_row_if(row.attended, row.data + in_row + j * kChunkBytes);
    raw[7] = load_rope(row, 0);
    raw[8] = load_rope(row, 1);
  };
  const Row likely = locate(p.source[guess.keys[0].extra], guessed[0]);
  load_row(likely);
  const Work w = my_work(p, block, lengths_at, lengths);
  if (w.range.empty()) return false;
  const int slot = first_slot(p, w, guess, 0, guessed[0], key);
  const bool extra = w.range.begin >= w.row.main_blocks;
  bool attended = likely.attended;
  if (slot != guessed[0] || extra != guess.keys[0].extra) {
    const Row row = locate(p.source[extra], slot);
    attended = row.attended;
    load_row(row);
  }
  int next_slot = first_slot(p, w, guess, 1, guessed[1], key);

  int stage = 0;
  uint32_t phase = 0;
  for (int tile = w.range.begin; tile < w.range.end; ++tile) {
    const Row next = locate(p.source[tile + 1 >= w.row.main_blocks], next_slot);
    next_slot = load_slot(p, w, tile + 2, key);
    const uint2 now = scales;
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), phase ^ 1);
    scales = ld_scales_if(next.attended, next.scales);

    const uint32_t keys_at = ptx::shared_address(shared.keys[stage]);
    const uint32_t even_chunk = keys_at + code_at;
    const uint32_t odd_chunk = keys_at + (code_at ^ 16);
    uint32_t nan = 0;
#pragma unroll
    for (int j = 0; j < kNumScales; ++j) {
      const uint4 codes = raw[j];
      nan |= nan_codes(codes.x) | nan_codes(codes.y) | nan_codes(codes.z) | nan_codes(codes.w);
      const uint32_t scale = scale_pair(min(scale_byte(now, j), kLargestSingleScale));
      ptx::st_shared(even_chunk + j * kBlockBytes, dequantise(codes.x, codes.y, scale));
      ptx::st_shared(odd_chunk + j * kBlockBytes, dequantise(codes.z, codes.w, scale));
      raw[j] = ld_row_if(next.attended, next.data + in_row + j * kChunkBytes);
      __syncwarp();  // keeps the load here: left to itself the assembler gathers all of them at the end of the tile
    }
    const uint32_t rope_block = keys_at + kNumScales * kBlockBytes;
    ptx::st_shared(rope_block + rope_at, raw[7]);
    raw[7] = load_rope(next, 0);
    ptx::st_shared(rope_block + (rope_at ^ 64), raw[8]);
    raw[8] = load_rope(next, 1);

    if (has_large_scale(now)) {
#pragma unroll 1
      for (int j = 0; j < kNumScales; ++j) {
        const uint32_t e = scale_byte(now, j);
        if (e <= kLargestSingleScale) continue;
        multiply_shared(even_chunk + j * kBlockBytes, second_scale_pair(e));
        multiply_shared(odd_chunk + j * kBlockBytes, second_scale_pair(e));
      }
    }
    if ((nan & 0x80808080u) != 0) ptx::st_shared(rope_block + rope_at, kNanPair);

    const uint32_t attended_keys = __ballot_sync(0xffffffffu, attended);
    if (lane == 0) shared.attended[stage][warp] = attended_keys;
    attended = next.attended;
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.full[stage]));
    stage ^= 1;
    phase ^= stage == 0;
  }
  return true;
}

}  // namespace sgl_dsv4::sm90
