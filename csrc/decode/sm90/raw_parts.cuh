// What the kernels of 8, 16 and 32 heads share whose blocks take one part after the other: more parts than SMs; bf16
// outputs without amax, of some rows partials; query and outputs that start at multiples of 16 bytes. The copying
// warps.
//
// A stage has a tile or, before the first tile of a part, its query as it lies in memory. Its label says how many tiles
// follow, so a tile costs what it costs in a block of one part.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/finish.cuh"
#include "decode/query.cuh"
#include "decode/sm90/gather.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/raw_tiles.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

struct RawPartsParams {
  DecodeParams decode;
  uint32_t num_parts;  // of whole rows, then of splits
};

template <int kHeads, typename Shared>
struct RawParts {
  // Waits for a part's query, whose turn it is. Returns how many tiles come behind it; 0: no more parts.
  __device__ __forceinline__ static int wait_for_part(const Turn& turn, const Shared& shared) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
    return __shfl_sync(kAllLanes, shared.tiles[turn.stage].label.tiles, 0);
  }
  // That is done with.
  __device__ __forceinline__ static void release_query(Turn& turn) {
    ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
    turn.skip_stage();
  }

  __device__ __forceinline__ static void init_barriers(Shared& shared) {
    init_raw_barriers(shared);
    for (uint64_t& barrier : shared.ends_full) ptx::mbarrier_init(ptx::shared_address(&barrier), kWeighWarps * 32);
  }

  // The factors of a lane of the RoPE part, which came with the query.
  __device__ __forceinline__ static query::Factors query_factors(const PartsTile<kHeads>& tile, int lane) {
    query::Factors factors;
#pragma unroll
    for (int i = 0; i < query::kPairs; ++i)
      factors.pair[i] =
          *reinterpret_cast<const float2*>(tile.rotation + (lane - query::kFirstRopeLane) * query::kVec + 2 * i);
    return factors;
  }

  // By the weighing warps, behind a part's last weights: its LSEs, and what its values are to be multiplied by.
  __device__ __forceinline__ static void finish_part(const DecodeParams& p, uint32_t at, uint32_t part,
                                                     const Turn& turn, int head, int head_lane, float unit, float total,
                                                     Shared& shared) {
    const Part w = part_at<true>(p, kHeads, at);
    if (head_lane == 0)
      finish_head(p, w, ends_of(!w.whole), head, unit, total, shared.tiles[turn.stage].sinks[head],
                  shared.ends[part & 1]);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.ends_full[part & 1]));
  }

  // Of 16 channels of the RoPE part a lane has g and g + 8, and gives one away: which pair of neighbours it then has.
  __device__ __forceinline__ static int pair_of(int g) { return g % 2 != 0 ? g + 7 : g; }
  __device__ __forceinline__ static void exchange_pair(float& x, float& y, bool odd) {
    const float other = __shfl_xor_sync(kAllLanes, odd ? x : y, 4);
    if (odd) {
      x = other;
    } else {
      y = other;
    }
  }

  // ---- copying ----
  //
  // A row's index comes two tiles ahead.

  static constexpr int kCopyThreads = kCopyWarps * 32, kHeadChunks = kHeadDim * 2 / 16;
  static constexpr int kHeadsAtOnce = kCopyThreads / kHeadChunks;
  __device__ __forceinline__ static int copy_thread() { return ptx::thread_of_block() & (kCopyThreads - 1); }
  static_assert(kAttendThreads % kCopyThreads == 0);

  // Starts the copies of a row's rotation, NaN outside the table.
  __device__ __forceinline__ static void copy_rotation(const float* freqs, int64_t position, int64_t rows,
                                                       int64_t stride, float* rotation) {
    const int i = copy_thread();
    if (freqs == nullptr || i >= kRopeDim) return;
    if (position >= 0 && position < rows) {
      ptx::cp_async_4(ptx::shared_address(rotation + i), freqs + position * stride + i);
    } else {
      rotation[i] = NAN;
    }
  }

  // Of a part's heads, which lie one behind the other; those past the last are zeros.
  __device__ __forceinline__ static void copy_query(const DecodeParams& p, const Part& part, PartsTile<kHeads>& tile) {
    const query::Position position = query::load_position(p.query, part.token, p.query.freqs_cis != nullptr);
    int head = copy_thread() / kHeadChunks;
    uint32_t to = ptx::shared_address(tile.rows) + copy_thread() * 16;
    const auto* from = static_cast<const __nv_bfloat16*>(p.q) + part.token * p.stride_q_token +
                       (part.first_head + head) * p.stride_q_head + copy_thread() % kHeadChunks * 8;
#pragma unroll 4
    for (; head < kHeads; head += kHeadsAtOnce) {
      ptx::cp_async_16_if(head < part.heads, to, from);
      to += kCopyThreads * 16;
      from += kHeadsAtOnce * p.stride_q_head;
    }
    copy_rotation(p.query.freqs_cis, position.value(p.query), p.query.num_freqs, p.query.stride_freqs_position,
                  tile.rotation);
  }

  // What a part's end needs, with its last tile.
  __device__ __forceinline__ static void copy_ends(const DecodeParams& p, const Part& part, PartsTile<kHeads>& tile) {
    const CombineParams& f = p.finish;
    const int64_t position = f.freqs_cis != nullptr ? finish::load_position(part.token, f) : 0;
    const int head = copy_thread() - kRopeDim;
    if (head >= 0 && head < kHeads) {
      if (f.attn_sink != nullptr && head < part.heads) {
        ptx::cp_async_4(ptx::shared_address(&tile.sinks[head]), f.attn_sink + part.first_head + head);
      } else {
        tile.sinks[head] = kMinusInfinity;
      }
    }
    copy_rotation(f.freqs_cis, position, f.num_freqs, f.stride_freqs_position, tile.rotation);
  }

  __device__ __forceinline__ static void copy_parts(const RawPartsParams& params, Shared& shared) {
    const DecodeParams& p = params.decode;
    const int key = copy_key();
    Turn turn;  // of stages
    const auto wait_for_room = [&] {
      if (turn.tile >= kRawStages) ptx::bar_sync(kEmpty + turn.stage, kRawThreads);
    };
    const auto set_label = [&](uint32_t at, int tiles) {
      if (copy_thread() == 0) shared.tiles[turn.stage].label = {at, tiles};
    };
#pragma unroll 1
    for (uint32_t at = ptx::ctaid_x(); at < params.num_parts; at += gridDim.x) {
      const Part part = part_at<true>(p, kHeads, at);
      const Lengths lengths = find_lengths(p, part);
      const Work w = my_work(p, part, lengths, load(lengths));
      if (w.range.empty()) continue;  // others write its zeros
      int slot = load_slot_inline(p, w, w.range.begin, key);
      int next_slot = load_slot_inline(p, w, w.range.begin + 1, key);
      wait_for_room();
      set_label(at, w.range.end - w.range.begin);
      copy_query(p, part, shared.tiles[turn.stage]);
      hand_over(shared.full[turn.stage]);
      turn.advance();
#pragma unroll 1
      for (int tile = w.range.begin; tile < w.range.end; ++tile) {
        const Row row = locate(p.source[tile >= w.row.main_blocks], slot);
        slot = next_slot;
        next_slot = load_slot_inline(p, w, tile + 2, key);
        wait_for_room();
        copy_lines(row, shared.tiles[turn.stage]);
        if (tile + 1 == w.range.end) copy_ends(p, part, shared.tiles[turn.stage]);
        hand_over(shared.full[turn.stage]);
        turn.advance();
      }
    }
    wait_for_room();
    set_label(0, 0);
    hand_over(shared.full[turn.stage]);
#pragma unroll 1
    for (int i = min(turn.tile, kRawStages - 1); i > 0; --i)
      ptx::bar_sync(kEmpty + (turn.tile - i) % kRawStages, kRawThreads);
  }

  // Parts without keys, by warps that have to wait for the first tile anyway.
  __device__ __forceinline__ static void write_empty_parts(const RawPartsParams& params, int warp, int warps) {
#pragma unroll 1
    for (uint32_t at = ptx::ctaid_x(); at < params.num_parts; at += gridDim.x) {
      const Part part = part_at<true>(params.decode, kHeads, at);
      const Lengths lengths = find_lengths(params.decode, part);
      if (my_work(params.decode, part, lengths, load(lengths)).range.empty())
        write_empty_part(params.decode, part, part.whole, ptx::thread_of_block() % 32, warp, warps);
    }
  }
};

}  // namespace sgl_dsv4::sm90
