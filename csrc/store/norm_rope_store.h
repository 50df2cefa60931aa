// RMSNorm(512) + RoPE(last 64) + quantise + write one row into a paged cache: parameters and launchers. No torch here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cache_layout.h"

namespace sgl_dsv4 {

// Where a row's position and slot come from.
enum class StoreEntry {
  kMain,            // positions[i], slots[i]
  kCompressDecode,  // plan record i: seq_len @0; slots[i]; stored only when seq_len is a multiple of the ratio
  kCompressExtend,  // plan record i: seq_len @0 (0xffffffff = invalid), ragged_id (u16) @4; slots[ragged_id]
};

// RoPE position of a plan record = seq_len - compress_ratio. A row whose position lies outside [0, num_positions), or
// whose slot lies outside [0, num_slots_in_cache), writes nothing.
//
// Order: kernel parameters reach an SM in lines of 64 bytes, the first of which holds 48 of these. What the longest
// chain of fetches (plan, then RoPE factors) needs comes first.
struct StoreParams {
  const void* positions;    // kMain: (num_tokens) int32 or int64; else nullptr
  const uint4* plan;        // kCompress*: (num_tokens) 16-byte records; else nullptr
  const float* freqs_cis;   // (num_positions, 64) fp32, contiguous: 32 (cos, sin) pairs a position
  const void* slots;        // (num_slots) int32 or int64
  uint32_t num_positions;   // <= kMaxStoreRows
  uint32_t compress_ratio;  // kCompress* only; <= kMaxStoreRows

  const void* kv;               // (num_tokens, 512) bf16 or fp32
  uint32_t stride_kv_row;       // elements
  const void* weight;           // (512) same type as kv
  uint8_t* cache;               // (pages, >= page_bytes)
  int64_t stride_cache_page;    // bytes
  uint32_t num_slots_in_cache;  // pages * page_size, <= kMaxStoreRows
  uint32_t num_slots;           // length of `slots`
  uint32_t num_tokens;          // <= kMaxStoreRows
  int32_t page_bits;            // log2(page_size)
  uint32_t scale_offset;        // of a page's scales from its first byte
  float eps;
  uint64_t ratio_reciprocal;  // kCompressDecode: see ratio_reciprocal()
};

// n is a multiple of `ratio` if and only if n * r <= r - 1 in 64-bit arithmetic, r = ratio_reciprocal(ratio), for every
// 32-bit n and ratio >= 1 (Lemire, Kaser, Kurz, "Faster remainder by direct computation", 2019).
constexpr uint64_t ratio_reciprocal(uint32_t ratio) {
  return ~uint64_t{0} / ratio + 1;
}

// Tokens, positions and slots: a cache of this many slots would be over a terabyte.
inline constexpr int64_t kMaxStoreRows = (int64_t{1} << 31) - 1;

struct StoreConfig {
  StoreEntry entry;
  CacheLayout layout;
  bool input_is_fp32;  // else bf16
  bool positions_are_int64;
  bool slots_are_int64;
  bool aligned;          // kv, weight, freqs_cis and cache, their rows and pages, start at multiples of 16 bytes
  int tokens_per_block;  // 0 = choose, 1 or 4; not aligned: always 1
  bool pdl;
};

// Enqueues on `stream` of the current device. num_tokens == 0 launches nothing.
cudaError_t launch_norm_rope_store(const StoreConfig& config, const StoreParams& params, cudaStream_t stream);

// The K that `launch_norm_rope_store` takes for tokens_per_block = 0 on a device with `sm_count` multiprocessors that
// hold `threads_per_sm` threads each.
int choose_tokens_per_block(int64_t num_tokens, int sm_count, int threads_per_sm);

// Success if this binary holds code that the current device can run.
cudaError_t store_device_code();

}  // namespace sgl_dsv4
