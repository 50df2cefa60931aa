// From index lists to rows of the cache, for all kernels; and the gathering warpgroups of 64 heads a block: rows ->
// bf16 tiles in shared memory. (The others copy rows as they are, raw_tiles.cuh.)
//
// A warp has 8 keys of every tile, 4 lanes a key. One copy instruction takes 64 consecutive bytes of each of its 8
// rows: nine of them are a row, the first seven one scale group each, the last two the RoPE part. Raw chunks come
// through a ring in shared memory of which every thread has its own 16 bytes a slot, so no barrier guards it: as soon
// as a chunk has been read, the one kRing further on, of this tile or of the next, is on its way into its slot. (Loads
// into registers cannot do this: the assembler waits for all loads that a loop carries into its next round at once.)
#pragma once

#include <cstdint>

#include "common/cache_layout.h"
#include "common/ptx.cuh"
#include "decode/sm90/dequant.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

inline constexpr int kLanesPerKey = 4;
inline constexpr int kKeysPerWarp = 32 / kLanesPerKey;
inline constexpr int kChunkBytes = kLanesPerKey * 16;  // of a row, a copy instruction
inline constexpr int kChunks = V4Layout::kDataBytes / kChunkBytes;
static_assert(kChunks == 9 && kChunkBytes == kQuantGroup && kKeysPerWarp * (kGatherThreads / 32) == kTileKeys);

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

// The same without a branch: between other instructions of a block.
__device__ __forceinline__ int load_slot_inline(const DecodeParams& p, const Work& w, int tile, int key) {
  const KeyBlock keys = key_block(w.row, tile);
  const Source& source = p.source[keys.extra];
  const int at = keys.begin + key;
  const bool wanted = tile < w.range.end && at < keys.end;
  return static_cast<int>(
      ptx::ld_global_if(wanted, source.indices + w.token * source.stride_indices + at, 0xffffffffu));
}

// A thread's key in the block's first two tiles if all lengths are full. Which rows these are is asked for beside the
// lengths, and the first one is read, before the lengths are known; it is not attended to if they say otherwise.
struct Guess {
  KeyBlock keys[2];
  const int32_t* at[2];  // where the indices lie; nullptr: there is no such key
};

__device__ __forceinline__ int gather_key(int thread) {
  return (thread - kConsumerThreads) / kLanesPerKey;
}

__device__ __forceinline__ Guess guess_keys(const DecodeParams& p, const Part& part, int key) {
  const int width = p.source[0].width, extra_width = p.source[1].width;
  const RowBlocks row = row_blocks(width, width, extra_width, extra_width);
  const BlockRange range = my_tiles(p, row, part);
  Guess guess;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    guess.keys[i] = key_block(row, range.begin + i);
    const int at = guess.keys[i].begin + key;
    const Source& source = p.source[guess.keys[i].extra];
    const bool any = range.begin + i < range.end && at < guess.keys[i].end;
    guess.at[i] = any ? source.indices + part.token * source.stride_indices + at : nullptr;
    ptx::keep(guess.at[i]);
  }
  return guess;
}

// What lies where the guess said, -1 where there is no such key, and the row's lengths.
struct FirstLoads {
  int slots[2];
  RowLengths lengths;
};

__device__ __forceinline__ FirstLoads load_first(const Guess& guess, const Lengths& lengths_at) {
  const int slot = ld_int(guess.at[0]);
  const RowLengths lengths = load(lengths_at);
  const int next_slot = ld_int(guess.at[1]);
  __syncwarp();  // keeps the loads here: left to itself the assembler puts those of the lengths behind the first copies
  return {{guess.at[0] != nullptr ? slot : -1, guess.at[1] != nullptr ? next_slot : -1}, lengths};
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

// What the block's first row is as the lengths say: its cache and slot, and whether it is another than was guessed for
// any lane of the warp.
struct FirstRow {
  int slot;
  bool extra, other;
};

__device__ __forceinline__ FirstRow check_first(const DecodeParams& p, const Work& w, const Guess& guess,
                                                const FirstLoads& first, int key) {
  const int slot = first_slot(p, w, guess, 0, first.slots[0], key);
  const bool extra = w.range.begin >= w.row.main_blocks;
  return {slot, extra, __any_sync(kAllLanes, slot != first.slots[0] || extra != guess.keys[0].extra) != 0};
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

// A gathering thread.
struct Gathering {
  const DecodeParams& p;
  TileMemory& shared;
  int lane, warp;
  int part, key;  // which quarter of which row of a tile
  int odd;
  uint32_t code_at, rope_at;
  uint32_t ring, other;
  Row row = {}, next = {};  // in this tile and in the one behind it
  uint2 scales;
  uint4 raw;
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ Gathering(const DecodeParams& p, TileMemory& shared, int thread) : p(p), shared(shared) {
    lane = thread & 31;
    warp = (thread - kConsumerThreads) / 32;
    part = lane % kLanesPerKey;
    key = gather_key(thread);

    // Within a channel block a lane fills two neighbouring 16-byte chunks from its 16 codes, and one from each copy of
    // the RoPE part. Odd rows take the two halves of the RoPE part in the other order, so that the 8 lanes of a store
    // phase, an even and an odd row, hit all banks.
    odd = key % 2;
    code_at = static_cast<uint32_t>(tile_offset(key, 16 * part));
    rope_at = static_cast<uint32_t>(tile_offset(key, 8 * (part + 4 * odd)));

    // Chunk j of this tile, then of the next, lies in slot j modulo kRing behind that of chunk 0, which in the next
    // tile is half a ring on.
    ring = ptx::shared_address(shared.ring) + (thread - kConsumerThreads) * 16;
    other = ring + kPart * kRingSlotBytes;
  }

  static constexpr int kPart = kRing / 2;
  static_assert(kChunks % kRing == kPart);

  __device__ __forceinline__ uint32_t slot_of(int j) const {
    return (j / kPart % 2 == 0 ? ring : other) + static_cast<uint32_t>(j % kPart * kRingSlotBytes);
  }

  __device__ __forceinline__ Row my_part_of(const Source& source, int slot) const {
    Row mine = locate(source, slot);
    mine.data += part * 16;
    return mine;
  }

  __device__ __forceinline__ void fetch(int j, uint32_t slot) const {
    const Row& from = j < kChunks ? row : next;
    const int chunk = j % kChunks;
    const uint8_t* at = from.data + chunk * kChunkBytes;
    if (chunk == kNumScales) at += odd * kChunkBytes;
    if (chunk == kNumScales + 1) at -= odd * kChunkBytes;
    ptx::cp_async_16_if(from.attended, slot, at);
    ptx::cp_async_commit();
  }

  // The ring's first chunks: as guessed, then as the lengths say. Either way the last kRing groups of copies are those
  // of the right row.
  __device__ __forceinline__ void begin_row(const Source& source, int slot) {
    row = my_part_of(source, slot);
    scales = ptx::ld_global_v2_if(row.attended, row.scales);
#pragma unroll
    for (int j = 0; j < kRing; ++j) fetch(j, slot_of(j));
  }

  __device__ __forceinline__ void read_first() {
    ptx::cp_async_wait_but<kRing - 1>();
    raw = ptx::ld_shared(slot_of(0));
  }

  // What lies where the guess said is on its way, before the lengths are known. Returns the part's work.
  __device__ __forceinline__ Work begin(const Part& block, const Lengths& lengths_at, const Guess& guess,
                                        const FirstLoads& first) {
    begin_row(p.source[guess.keys[0].extra], first.slots[0]);
    return my_work(p, block, lengths_at, first.lengths);
  }

  // As the lengths say.
  __device__ __forceinline__ void correct(const Work& w, const Guess& guess, const FirstLoads& first) {
    const FirstRow actual = check_first(p, w, guess, first, key);
    if (actual.other) {
      ptx::cp_async_wait();  // the guessed row lands in the same slots
      begin_row(p.source[actual.extra], actual.slot);
    }
  }

  // Converts a tile. `look_ahead` finds `next` and asks for its scales.
  template <typename LookAhead>
  __device__ __forceinline__ void take_tile(const LookAhead& look_ahead) {
    // The vote is here, not where its result is used, because the assembler has one scoreboard for all loads that a
    // loop carries into its next round: the last round's scales are to be waited for before this round's loads start.
    const uint2 now = scales;
    const bool large_scale = __any_sync(0xffffffffu, has_large_scale(now));

    const uint32_t keys_at = ptx::shared_address(shared.keys[stage]);
    const uint32_t even_chunk = keys_at + code_at;
    const uint32_t odd_chunk = keys_at + (code_at ^ 16);
    const uint32_t rope_block = keys_at + kNumScales * kBlockBytes;

    // Chunk j is in registers, so its slot is free: asks for the next chunk there, and reads chunk j + 1. All that
    // before a wait for room in the tile.
    const auto advance = [&](int j) {
      fetch(j + kRing, slot_of(j));
      ptx::cp_async_wait_but<kRing - 1>();
      raw = ptx::ld_shared(slot_of(j + 1));
    };
    const auto hand_over = [&](int half) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.barriers.full[stage][half]));
    };

    uint32_t nan = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = half * kHalfBlocks, end = half == 0 ? kHalfBlocks : kNumScales;
#pragma unroll
      for (int j = begin; j < end; ++j) {
        const uint4 codes = raw;
        nan |= nan_codes(codes.x) | nan_codes(codes.y) | nan_codes(codes.z) | nan_codes(codes.w);
        ptx::keep(nan);  // left to itself the compiler does this later, and the codes stay in registers
        const uint32_t scale = scale_pair(min(scale_byte(now, j), kLargestSingleScale));
        const uint4 even = dequantise(codes.x, codes.y, scale), odd = dequantise(codes.z, codes.w, scale);
        advance(j);
        if (j == begin) ptx::mbarrier_wait(ptx::shared_address(&shared.barriers.empty[stage][half]), phase ^ 1);
        ptx::st_shared(even_chunk + j * kBlockBytes, even);
        ptx::st_shared(odd_chunk + j * kBlockBytes, odd);
        if (j == 0) look_ahead();  // behind the wait for room, among the conversions, whose waits it fills
      }
      if (large_scale) {
#pragma unroll 1
        for (int j = begin; j < end; ++j) {
          const uint32_t e = scale_byte(now, j);
          if (e <= kLargestSingleScale) continue;
          multiply_shared(even_chunk + j * kBlockBytes, second_scale_pair(e));
          multiply_shared(odd_chunk + j * kBlockBytes, second_scale_pair(e));
        }
      }
      if (half == 0) hand_over(0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 values = raw;
      advance(kNumScales + i);
      ptx::st_shared(rope_block + (rope_at ^ (64 * i)), values);
    }
    if ((nan & 0x80808080u) != 0) ptx::st_shared(rope_block + rope_at, kNanPair);
    const uint32_t attended_keys = __ballot_sync(0xffffffffu, row.attended);
    if (lane == 0) shared.attended[stage][warp] = attended_keys;
    hand_over(1);

    row = next;
    const uint32_t swap = ring;
    ring = other;
    other = swap;
    stage ^= 1;
    phase ^= stage == 0;
  }
};

// A part. Returns whether it has keys.
__device__ __forceinline__ bool gather(const DecodeParams& p, const Part& block, const Lengths& lengths_at,
                                       const Guess& guess, TileMemory& shared) {
  const FirstLoads first = load_first(guess, lengths_at);
  Gathering g(p, shared, static_cast<int>(threadIdx.x));
  const Work w = g.begin(block, lengths_at, guess, first);
  if (w.range.empty()) {
    ptx::cp_async_wait();
    return false;
  }
  g.correct(w, guess, first);
  int next_slot = first_slot(p, w, guess, 1, first.slots[1], g.key);
  g.read_first();
  for (int tile = w.range.begin; tile < w.range.end; ++tile) {
    g.take_tile([&] {
      g.next = g.my_part_of(p.source[tile + 1 >= w.row.main_blocks], next_slot);
      next_slot = load_slot_inline(p, w, tile + 2, g.key);
      g.scales = ptx::ld_global_v2_if(g.next.attended, g.next.scales);
    });
  }
  ptx::cp_async_wait();
  return true;
}

}  // namespace sgl_dsv4::sm90
