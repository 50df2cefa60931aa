// Blocks of 16 or 32 heads that take one part after the other (raw_parts.cuh). Roles and products are those of
// few_heads.cuh.
//
// A query is made the operand of the products by the scoring warps when they are done with the part before. Outputs
// leave a value warpgroup by 64 channels, through a small buffer: the stage of the last tile is free as soon as the
// products are done. Partials leave from the accumulators.
//
// barrier            who arrives             what becomes true
// ends_full[part]    weighing threads        inverse and factor of the part's heads are in ends[]; parts in turn
// kScoreWarpsMeet    scoring threads         nobody reads Q any more; then: the next part's is stored
// kValueWarpsMeet+g  value warpgroup g       64 channels of its outputs are in shared memory
//
// The others as in few_heads.cuh, but that every tile and every query is released, also the last, and that the warps
// that wait for room take what is released behind the last tile too.
//
// Shared memory, KiB, 16 | 32 heads: four stages 152, scores 9 | 17, Q 16 | 32, P 4 | 8, outputs 8 | 16. Registers as
// in few_heads.cuh.
//
// Cycles (1.755 GHz) by clock reads in an instrumented build, 32 heads, 256 rows of 128 + 512 keys, where a tile takes
// 3200: last scores to the next query stored 6800 (its own part 4600), to the first scores 8900, weights 11300; last
// products to outputs written 4900, of which the last row of a block, alone on its SM, takes 2200.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/epilogue.cuh"
#include "decode/finish.cuh"
#include "decode/query.cuh"
#include "decode/sm90/few_heads.cuh"
#include "decode/sm90/gather.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/raw_parts.cuh"
#include "decode/sm90/raw_tiles.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

template <int kHeads>
struct FewParts : FewHeads<kHeads, FewPartsMemory<kHeads>>, RawParts<kHeads, FewPartsMemory<kHeads>> {
  using Base = FewHeads<kHeads, FewPartsMemory<kHeads>>;
  using Parts = RawParts<kHeads, FewPartsMemory<kHeads>>;
  using Base::kRegs;
  using Base::kValueBlocks;
  using typename Base::Output;
  using typename Base::QueryPlace;
  using typename Base::Shared;
  using typename Base::Softmax;
  using typename Base::ValuePlace;

  // ---- scores ----

  static constexpr int kScoreWarps = kScoreThreads / 32;

  // A part's query, by both warpgroups, two heads of a warp at a time: what runs once takes longer to come into the
  // instruction caches than to run.
  __device__ __forceinline__ static void take_query(const DecodeParams& p, const PartsTile<kHeads>& tile,
                                                    float* q_scale, Shared& shared) {
    const int thread = ptx::thread_of_block(), warp = __shfl_sync(kAllLanes, thread / 32, 0), lane = thread % 32;
    const bool rotates = p.query.freqs_cis != nullptr && lane >= query::kFirstRopeLane;
    query::Factors factors = {};
    if (rotates) factors = Parts::query_factors(tile, lane);
    constexpr int kAtOnce = 2;
    ptx::bar_sync(kScoreWarpsMeet, kScoreThreads);  // nobody reads the one before any more
#pragma unroll 1
    for (int first = warp; first < kHeads; first += kAtOnce * kScoreWarps) {
      const uint32_t raw = ptx::shared_address(tile.rows) + first * kHeadDim * 2 + lane * 16;
      query::Values heads[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int v = 0; v < query::kVectors; ++v) {
          const uint4 x = ptx::ld_shared(raw + i * kScoreWarps * kHeadDim * 2 + v * 512);
          heads[i].vector[v] = {{x.x, x.y, x.z, x.w}};
        }
      }
      const QueryPlace place(shared, first, lane);
      Base::template store_heads<kAtOnce, kScoreWarps>(p, heads, rotates, factors, place, q_scale + first, lane);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kScoreWarpsMeet, kScoreThreads);
  }

  template <int kPart>
  __device__ __forceinline__ static void score_tiles(Turn& turn, int tiles, Shared& shared) {
    const uint64_t query = Base::template query_of<kPart>(shared);
#pragma unroll 1
    for (const int end = turn.tile + tiles; turn.tile < end; turn.advance()) {
      Base::template score_tile<kPart>(turn, query, shared);
      ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
    }
  }

  __device__ __forceinline__ static void score_parts(const DecodeParams& p, int half, Shared& shared) {
    uint32_t parts = 0;
    Turn turn;
#pragma unroll 1
    while (const int tiles = Parts::wait_for_part(turn, shared)) {
      take_query(p, shared.tiles[turn.stage], shared.q_scale[parts++ & 1], shared);
      Parts::release_query(turn);
      if (half == 0) {
        score_tiles<0>(turn, tiles, shared);
      } else {
        score_tiles<1>(turn, tiles, shared);
      }
    }
    if (turn.tile > 0) ptx::bar_sync(kScoresEmpty, Base::kScoresThreads);
  }

  // ---- weights ----

  __device__ __forceinline__ static void weigh_parts(const DecodeParams& p, Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = weigh_warp();
    const int head = Base::lane_head(warp, lane), head_lane = lane % Base::kHeadLanes;
    uint32_t parts = 0;
    Turn turn;
#pragma unroll 1
    while (const int tiles = Parts::wait_for_part(turn, shared)) {
      const uint32_t at = shared.tiles[turn.stage].label.part;
      Parts::release_query(turn);
      Softmax softmax;
#pragma unroll 1
      for (const int end = turn.tile + tiles; turn.tile < end; turn.advance()) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
        if (turn.tile >= 2) ptx::bar_sync(kWeightsEmpty + turn.buffer(), Base::kWeightsThreads);
        Base::store_factors(shared.tiles[turn.stage], warp, lane);
        ptx::bar_sync(kScoresFull, Base::kScoresThreads);
        const float scale = p.scale_log2 * shared.q_scale[parts & 1][head];
        softmax.weigh(shared, turn, true, head, head_lane, scale);
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(ptx::shared_address(&shared.weights_full[turn.buffer()]));
        if (turn.tile + 1 == end) {
          const float total = lanes_sum<Base::kHeadLanes>(softmax.total);
          Parts::finish_part(p, at, parts, turn, head, head_lane, softmax.unit, total, shared);
        }
        ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
      }
      ++parts;
    }
#pragma unroll 1
    for (int tile = max(turn.tile - 2, 0); tile < turn.tile; ++tile)
      ptx::bar_sync(kWeightsEmpty + tile % 2, Base::kWeightsThreads);
  }

  // ---- values ----

  // What a value thread's outputs are multiplied with and rotated by.
  struct Ends {
    float2 inverse[kHeads / 8], factor[kHeads / 8];
    float2 turn;

    __device__ __forceinline__ Ends(const PartEnds<kHeads>& ends, const float* rotation, int quarter, int lane) {
      const int column = lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) {
        inverse[n] = *reinterpret_cast<const float2*>(ends.inverse + 8 * n + column);
        factor[n] = *reinterpret_cast<const float2*>(ends.factor + 8 * n + column);
        if (inverse[n].x == 0.0f) factor[n].x = 0.0f;  // infinity minus infinity is NaN
        if (inverse[n].y == 0.0f) factor[n].y = 0.0f;
      }
      turn = *reinterpret_cast<const float2*>(rotation + quarter * 16 + Parts::pair_of(lane / 4));
    }
  };

  // Rows without keys become zeros, whatever the products of their keys are.
  __device__ __forceinline__ static void clear_empty(Output& o, const Ends& ends) {
    float least = 1.0f;
#pragma unroll
    for (int n = 0; n < kHeads / 8; ++n) least = fminf(least, fminf(ends.inverse[n].x, ends.inverse[n].y));
    if (!__any_sync(kAllLanes, least == 0.0f)) return;
#pragma unroll
    for (int b = 0; b < kValueBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kRegs; ++i) {
        const float2 inverse = ends.inverse[i / 4];
        if ((i % 2 == 0 ? inverse.x : inverse.y) == 0.0f) o[b][i] = 0.0f;
      }
    }
  }

  // The partials of a split, straight from the accumulators: 64 bytes of four heads an instruction.
  __device__ __forceinline__ static void write_partial(const DecodeParams& p, const Part& part, Output& o,
                                                       const ValuePlace& place, const Ends& ends) {
    const int thread = ptx::thread_of_block() % kWarpgroupThreads, lane = thread % 32, quarter = thread / 32;
    const int g = lane / 4, column = lane % 4 * 2;
    const bool odd = g % 2 != 0;
    clear_empty(o, ends);
#pragma unroll
    for (int b = 0; b < kValueBlocks; ++b) {
      const bool rope = b == kValueBlocks - 1 && place.has_rope;
      const int channel = (place.first + b) * kBlockChannels + quarter * 16 + (rope ? Parts::pair_of(g) : 2 * g);
#pragma unroll
      for (int i = 0; i < kRegs / 2; ++i) {
        const int n = i / 2, c = i % 2, head = 8 * n + column + c;
        const float inverse = c == 0 ? ends.inverse[n].x : ends.inverse[n].y;
        float x = o[b][4 * n + c] * inverse, y = o[b][4 * n + c + 2] * inverse;
        if (rope) Parts::exchange_pair(x, y, odd);
        if (head < part.heads) *reinterpret_cast<float2*>(o_of(p, part, head) + channel) = make_float2(x, y);
      }
    }
  }

  // A warpgroup's half of the channels, by blocks of 64: from the accumulators to shared memory, and in lines from
  // there.
  __device__ __forceinline__ static void write_part(const DecodeParams& p, const Part& part, Output& o,
                                                    const ValuePlace& place, const Ends& ends, Shared& shared) {
    const CombineParams& f = p.finish;
    const int thread = ptx::thread_of_block() % kWarpgroupThreads, lane = thread % 32, quarter = thread / 32;
    const int g = lane / 4, column = lane % 4 * 2, group = place.first / kValueBlocks;
    const bool odd = g % 2 != 0, rotated = f.freqs_cis != nullptr;
    constexpr int kBuffer = sizeof(shared.outputs[0][0]);
    const uint32_t buffers = ptx::shared_address(shared.outputs[group]);
    const uint32_t staged = buffers + column * kRowBytes;
    constexpr int kChunks = kRowBytes / 16, kRows = kWarpgroupThreads / kChunks;
    const int first_head = thread / kChunks, chunk = thread % kChunks;
    auto* to = static_cast<__nv_bfloat16*>(f.out) + part.token * f.stride_out_token +
               (part.first_head + first_head) * f.stride_out_head + place.first * kBlockChannels + chunk * 8;
    clear_empty(o, ends);
#pragma unroll
    for (int b = 0; b < kValueBlocks; ++b) {
      const bool rope = b == kValueBlocks - 1 && place.has_rope;
      const int pair = rope ? Parts::pair_of(g) / 2 : g;  // of the warp's eight of channels
      const uint32_t at = staged + b % 2 * kBuffer + pair % 4 * 4 + output_chunk(column, quarter * 2 + pair / 4) * 16;
#pragma unroll
      for (int i = 0; i < kRegs / 2; ++i) {
        const int n = i / 2, c = i % 2;
        const float inverse = c == 0 ? ends.inverse[n].x : ends.inverse[n].y;
        const float factor = c == 0 ? ends.factor[n].x : ends.factor[n].y;
        float x = o[b][4 * n + c] * inverse * factor, y = o[b][4 * n + c + 2] * inverse * factor;
        if (rope) {
          Parts::exchange_pair(x, y, odd);
          if (rotated && inverse != 0.0f) epilogue::rotate_back(x, y, ends.turn.x, ends.turn.y);
        }
        ptx::st_shared(at + (8 * n + c) * kRowBytes, epilogue::cvt_bf16x2(x, y));
      }
      ptx::bar_sync(kValueWarpsMeet + group, kWarpgroupThreads);
#pragma unroll
      for (int i = 0; i < kHeads; i += kRows) {
        const int head = first_head + i;
        const uint4 v = ptx::ld_shared(buffers + b % 2 * kBuffer + head * kRowBytes + output_chunk(head, chunk) * 16);
        if (head < part.heads) *reinterpret_cast<uint4*>(to + i * f.stride_out_head + b * kBlockChannels) = v;
      }
    }
  }

  __device__ __forceinline__ static void value_parts(const RawPartsParams& params, Shared& shared) {
    const DecodeParams& p = params.decode;
    const int warp = my_warp() - kScoreThreads / 32;
    Parts::write_empty_parts(params, warp, kValueThreads / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const ValuePlace place(shared, warp, lane);
    uint32_t parts = 0;
    Turn turn;
#pragma unroll 1
    while (const int tiles = Parts::wait_for_part(turn, shared)) {
      const uint32_t at = __shfl_sync(kAllLanes, shared.tiles[turn.stage].label.part, 0);
      Parts::release_query(turn);
      Output o = {};
      const auto release = [&] {
        ptx::bar_arrive(kWeightsEmpty + turn.buffer(), Base::kWeightsThreads);
        ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
        turn.advance();
      };
#pragma unroll 1
      for (const int last = turn.tile + tiles - 1;; release()) {
        Base::add_tile(o, place, turn, shared);
        if (turn.tile == last) break;
      }
      ptx::mbarrier_wait(ptx::shared_address(&shared.ends_full[parts & 1]), parts >> 1 & 1);
      const Ends ends(shared.ends[parts & 1], shared.tiles[turn.stage].rotation, warp % 4, lane);
      release();
      const Part part = part_at<true>(p, kHeads, at);
      if (part.whole) {
        write_part(p, part, o, place, ends, shared);
      } else {
        write_partial(p, part, o, place, ends);
      }
      ++parts;
    }
  }

  // ---- scoring and value warps ----

  __device__ __forceinline__ static void attend_parts(const RawPartsParams& params, int warp, Shared& shared) {
    if (warp < kScoreWarps) {
      Base::template move_registers<kRawLaunchRegisters, kFewScoreRegisters<kHeads>>();
      ptx::griddepcontrol_wait();
      score_parts(params.decode, warp / (kWarpgroupThreads / 32), shared);
    } else {
      Base::template move_registers<kRawLaunchRegisters, kFewValueRegisters<kHeads>>();
      ptx::griddepcontrol_wait();
      value_parts(params, shared);
    }
  }
};

}  // namespace sgl_dsv4::sm90
