// 16 or 32 heads a block: a tile's rows stay in shared memory as the cache has them (raw_tiles.cuh). Keys are rows and
// heads columns of the products, which take keys and values from registers and Q and P from shared memory (wgmma): what
// a warp has to do for a key does not depend on the number of heads.
//
//   4 copying warps    index lists -> rows -> cp.async -> tiles[stage]                                | full[stage]
//   8 scoring warps    S^T = K Q^T: codes -> fp16 -> products of a group, times the scale -> scores;
//                      a warpgroup has half of the channels                                           | kScoresFull
//   4 weighing warps   scales -> factors of the values; sum of both halves of the scores              | kScoresEmpty
//                      softmax -> weights, decay                                                      | weights_full
//   8 value warps      O^T = O^T decay + V^T P^T: codes -> bf16 x factor -> products; a warpgroup has half of the
//                      channels                                                                       | kWeightsEmpty
//
// Barriers as in eight_heads.cuh: mbarriers for what is waited for by many, hardware barriers for what many signal.
// kEmpty + stage: all that read tiles[stage] are done. kScoresEmpty: the scores of the tile before have been read; they
// exist once, weights and decay twice. kQueryStored, also in blocks without keys: Q and the number of tiles are in
// shared memory. kConsumersMeet, at the end: nobody reads the tiles any more, results replace them.
//
// Scores. The codes become fp16 by one instruction for two, exact, NaN included, and Q fp16 too: a head whose largest
// value is not in [2^-10, 2^15) is divided by 2^e, e within -100 .. 112, which brings it to 2^14 or 1. What fp16 rounds
// away is 2^-15 of the largest value or less. Scales multiply the sums of their 64 channels, in fp32, and 2^e the
// scores: where it is less than 1, one that is larger than 2^(128 + e) becomes infinite. The RoPE part stays bf16.
//
// A lane's operand is two neighbouring values each of rows g and g + 8 (lane = 4 g + c) and two more 8 columns on. For
// the scores columns are channels, and a lane takes 16 consecutive codes of a row: Q is stored in that order. For the
// values they are keys: transposed, ldmatrix gives a lane two neighbouring codes of two neighbouring keys, which become
// operands of the even and of the odd channel.
//
// Values. Code x 2^(e - 7), as dequant.cuh has it. Scales above the largest that one bf16 can hold: the key's weight
// takes what the largest of its scales is more, and the key's factors are so much less, also that of its RoPE part.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/sm90/consume.cuh"
#include "decode/sm90/dequant.cuh"
#include "decode/sm90/output.cuh"
#include "decode/sm90/raw_tiles.cuh"
#include "decode/sm90/wgmma.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

template <int kHeads, typename SharedMemory = FewHeadsSharedMemory<kHeads>>
struct FewHeads {
  using Shared = SharedMemory;
  static constexpr int kBlockHeads = kHeads;
  static constexpr bool kEmptyApart = kHeads == 32;
  static constexpr int kCopyRegisters = kFewCopyRegisters, kWeighRegisters = kFewWeighRegisters;
  static constexpr int kRegs = kHeads / 2;                   // of an accumulator
  static constexpr int kScoreGroups = (kNumScales + 1) / 2;  // of 64 channels, of a scoring warpgroup
  static constexpr int kValueBlocks = (kNumScales + 1) * kWarpgroupThreads / kValueThreads;
  static constexpr int kWeightsThreads = kValueThreads + kWeighWarps * 32;
  static constexpr int kScoresThreads = kScoreThreads + kWeighWarps * 32;
  static constexpr int kQueryThreads = kAttendThreads + kWeighWarps * 32;
  static constexpr int kEndThreads = kQueryThreads;
  static constexpr int kQueryHeads = kHeads / kAttendWarps;  // of a warp
  static_assert(kQueryHeads * kAttendWarps == kHeads && kScoreThreads + kValueThreads == kAttendThreads);

  // ---- weighing ----

  static constexpr int kWarpHeads = kHeads / kWeighWarps;
  static constexpr int kHeadLanes = 32 / kWarpHeads;
  static constexpr int kLaneKeys = kTileKeys / kHeadLanes;

  // A lane's head, which kHeadLanes neighbouring lanes have. Which ones keeps apart the banks of rows that are accessed
  // together: of scores by eight lanes, so two heads of four lanes are four apart; of weights by sixteen, so two heads
  // of eight lanes are four apart, and four heads of four lanes two.
  __device__ __forceinline__ static int lane_head(int warp, int lane) {
    const int i = lane / kHeadLanes;
    return kHeadLanes == 8 ? warp + i * kWeighWarps : warp * kWarpHeads + i % 2 * 4 + i / 2 % 2 * 2 + i / 4;
  }

  // Of kHeadLanes lanes, lane l has keys 4 l .. 4 l + 3 of each 4 kHeadLanes.
  struct Softmax {
    float top = kMinusInfinity, unit = kMinusInfinity, total = 0.0f;

    // more: another tile comes.
    __device__ __forceinline__ void weigh(Shared& shared, const Turn& turn, bool more, int head, int lane,
                                          float scale) {
      const int buffer = turn.buffer();
      const RawTile& tile = shared.tiles[turn.stage];
      const bool large = has_large(tile);
      float s[kLaneKeys];
      const uint2 attended = *reinterpret_cast<const uint2*>(tile.attended);
#pragma unroll
      for (int i = 0; i < kLaneKeys; i += 4) {
        const int key = key_of(i, lane);
        const float4 x = *reinterpret_cast<const float4*>(&shared.scores[0][head][key]);
        const float4 y = *reinterpret_cast<const float4*>(&shared.scores[1][head][key]);
        s[i] = (x.x + y.x) * scale, s[i + 1] = (x.y + y.y) * scale;
        s[i + 2] = (x.z + y.z) * scale, s[i + 3] = (x.w + y.w) * scale;
      }
      if (more) ptx::bar_arrive(kScoresEmpty, kScoresThreads);
      if ((attended.x & attended.y) != 0xffffffffu || large) {
        const int here = lane_here();
#pragma unroll
        for (int k = 0; k < kLaneKeys; ++k) {
          const int key = key_of(k, here);
          if (large && boost(tile, key) == kNanBoost) s[k] = NAN;
          if (!((key < 32 ? attended.x : attended.y) >> key % 32 & 1)) s[k] = kMinusInfinity;
        }
      }
      float most[kLaneKeys / 2];
#pragma unroll
      for (int k = 0; k < kLaneKeys / 2; ++k) most[k] = fmaxf(s[k], s[k + kLaneKeys / 2]);
#pragma unroll
      for (int n = kLaneKeys / 4; n > 0; n /= 2) {
#pragma unroll
        for (int k = 0; k < n; ++k) most[k] = fmaxf(most[k], most[k + n]);
      }
      const float decay = next_unit(lanes_max<kHeadLanes>(most[0]), top, unit);
      const float base = base_of(unit);
      float sum = 0.0f;
#pragma unroll
      for (float& weight : s) {
        weight = ptx::ex2(weight - base);
        sum += weight;
      }
      total = fmaf(total, decay, sum);
      if (lane == 0) shared.decay[buffer][head] = decay;
      if (large) {
        const int here = lane_here();
#pragma unroll
        for (int k = 0; k < kLaneKeys; ++k) s[k] *= __uint_as_float((boost(tile, key_of(k, here)) + 127u) << 23);
      }
      const uint32_t row = ptx::shared_address(shared.weights[buffer]) + head * kRowBytes + lane % 2 * 8;
#pragma unroll
      for (int i = 0; i < kLaneKeys; i += 4)
        ptx::st_shared(row + (key_of(i, lane) / 8 ^ head % 8) * 16, ptx::cvt_bf16x2(s[i], s[i + 1]),
                       ptx::cvt_bf16x2(s[i + 2], s[i + 3]));
    }

    // Read anew where it is rarely needed, so that what is made of it takes no registers elsewhere.
    __device__ __forceinline__ static int lane_here() { return ptx::thread_of_block() % kHeadLanes; }
    // The lane's score number k.
    __device__ __forceinline__ static int key_of(int k, int lane) { return (k / 4 * kHeadLanes + lane) * 4 + k % 4; }
  };

  __device__ __forceinline__ static bool has_large(const RawTile& tile) {
    return *reinterpret_cast<const uint32_t*>(tile.large) != 0;
  }
  // By how many powers of two the weight of a key is more, in a tile with large scales.
  __device__ __forceinline__ static uint32_t boost(const RawTile& tile, int key) {
    return tile.large[key / kWeighKeys] ? tile.boost[key] : 0u;
  }
  static constexpr uint32_t kNanBoost = 255 - kLargestSingleScale;

  // A lane has half of a key's scales; the eighth belongs to the RoPE part, whatever the cache has there.
  __device__ __forceinline__ static void store_factors(RawTile& tile, int warp, int lane) {
    const int key = warp * kWeighKeys + lane / 2, first = lane % 2 * 4;
    uint32_t scales = *reinterpret_cast<const uint32_t*>(&tile.scales[key][first]);
    if (first != 0) scales = (scales & 0x00ffffffu) | kScaleOfOne << 24;
    const bool large = __any_sync(kAllLanes, has_large_scale(make_uint2(scales, 0)));
    uint32_t boost = 0;
    if (large) {
      uint32_t most = __vmaxu2(scales & 0x00ff00ffu, scales >> 8 & 0x00ff00ffu);
      most = max(most & 0xffffu, most >> 16);
      most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
      boost = most > kLargestSingleScale ? most - kLargestSingleScale : 0;
      if (first == 0) tile.boost[key] = static_cast<uint8_t>(boost);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Of the RoPE part it is 2^-boost: its values are not placed, and need no 2^120.
      const bool rope = i == 3 && first != 0;
      tile.factors[first + i][weight_place(key)] =
          static_cast<uint16_t>(rope ? kOneBf16 - boost * 0x80u : scale_pair((scales >> 8 * i & 0xffu) - boost));
    }
    if (lane == 0) tile.large[warp] = large;
  }

  // Writes the LSEs and leaves in shared memory what the values are to be multiplied by. Returns as copy_tiles(). Tells
  // the attending warps how many tiles there are: what follows from the lengths is known here long before Q is.
  template <bool kPairs>
  __device__ __forceinline__ static bool weigh_tiles(const DecodeParams& p, const Part& part, const Lengths& lengths_at,
                                                     Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = weigh_warp();
    const Work w = my_work(p, part, lengths_at, load(lengths_at));
    const int tiles = w.range.end - w.range.begin;
    if (warp == 0 && lane == 0) shared.num_tiles = max(tiles, 0);
    const int head = lane_head(warp, lane), head_lane = lane % kHeadLanes;
    Softmax softmax;
    ptx::bar_sync(kQueryStored, kQueryThreads);
    if (tiles <= 0) return false;
    const float scale = p.scale_log2 * shared.q_scale[head];
#pragma unroll 1
    for (Turn turn; turn.tile < tiles; turn.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
      store_factors(shared.tiles[turn.stage], warp, lane);
      ptx::bar_sync(kScoresFull, kScoresThreads);
      if (turn.tile >= 2) ptx::bar_sync(kWeightsEmpty + turn.buffer(), kWeightsThreads);
      softmax.weigh(shared, turn, turn.tile + 1 < tiles, head, head_lane, scale);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(ptx::shared_address(&shared.weights_full[turn.buffer()]));
      if (turn.tile + kRawStages < tiles) ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
    }
    const float total = lanes_sum<kHeadLanes>(softmax.total);
    if (head_lane == 0)
      finish_head(p, w, kPairs ? Ends::kPairs : ends_of(p.o_accum != nullptr), head, softmax.unit, total,
                  load_sink(p, w, head), shared);
    ptx::bar_arrive(kConsumersMeet, kEndThreads);
    return true;
  }

  // ---- the query ----

  // Where a lane's vectors of a warp's first head go. Lanes have a key's channels in another order: a step of 16
  // channels of a product has two chunks of 16 bytes, and lane c has 4 bytes of each. So the words of a vector go to
  // four neighbouring chunks: word j to place ^ 16 j.
  struct QueryPlace {
    uint32_t at[query::kVectors];

    __device__ __forceinline__ QueryPlace(const Shared& shared, int head, int lane) {
      const int vector = lane % 8;  // of a group of 64 channels
#pragma unroll
      for (int i = 0; i < query::kVectors; ++i) {
        const bool rope = has_rope(i, lane);
        const int chunk = rope ? vector / 4 * 4 : vector % 2 * 4, column = rope ? vector % 4 : vector / 2;
        at[i] = ptx::shared_address(shared.q) + ((4 * i + lane / 8) * kHeads + head) * kRowBytes +
                (chunk ^ head % 8) * 16 + column * 4;
        ptx::keep(at[i]);
      }
    }
    __device__ __forceinline__ static bool has_rope(int vector, int lane) {
      return vector == query::kVectors - 1 && lane >= query::kFirstRopeLane;
    }
  };
  // To fp16 but for the RoPE part.
  __device__ __forceinline__ static void store_head(query::Values& v, float& q_scale, const QueryPlace& place, int row,
                                                    int lane) {
    const int exponent = largest_exponent(v);
    const int e = exponent > 14 ? min(exponent - 14, 112) : exponent < -10 ? max(exponent, -100) : 0;
    if (e != 0) {
      const uint32_t down = static_cast<uint32_t>(127 - e) * 0x00800080u;
#pragma unroll
      for (int i = 0; i < query::kVectors * query::kPairs; ++i) {
        uint32_t& word = v.vector[i / query::kPairs].word[i % query::kPairs];
        word = ptx::mul_bf16x2(word, down);
      }
    }
#pragma unroll
    for (int i = 0; i < query::kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < query::kPairs; ++j) {
        const uint32_t word = v.vector[i].word[j];
        const float2 x = unpack_bf16(word);
        const uint32_t pair = ptx::cvt_f16x2(x.x, x.y);
        ptx::st_shared((place.at[i] ^ 16 * j) + row * kRowBytes, QueryPlace::has_rope(i, lane) ? word : pair);
      }
    }
    if (lane == 0) q_scale = power_of_two(e);
  }

  // A warp's heads are kWarps apart; `place`, `q_scale`: of the first.
  template <int kCount, int kWarps>
  __device__ __forceinline__ static void store_heads(const DecodeParams& p, query::Values (&heads)[kCount],
                                                     bool rotates, const query::Factors& factors,
                                                     const QueryPlace& place, float* q_scale, int lane) {
    static_assert(kWarps % 8 == 0);  // all of them have the same order of chunks
    if (p.query.has_norm) query::normalise(heads, p.query.eps);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (rotates) query::rotate(heads[i].vector[query::kVectors - 1], factors);
      store_head(heads[i], q_scale[i * kWarps], place, i * kWarps, lane);
    }
  }

  // ---- scores ----

  static constexpr int kLower = 8 * kRawRowBytes;

  // 2^(e - 127), subnormal for 0. Of 255 infinity: the weighing warps know it.
  __device__ __forceinline__ static float scale_of(uint32_t scales, int i) {
    const uint32_t e = (i == 3 ? scales >> 1 : scales << (23 - 8 * i)) & 0x7f800000u;
    return __uint_as_float(max(e, 0x00400000u));
  }

  // A tile's scores of a warpgroup's channels. `rows`, `scales`: of key g, from the first of those channels on.
  template <bool kHasRope>
  __device__ __forceinline__ static void compute_scores(float (&total)[kRegs], uint32_t rows, uint32_t scales_at,
                                                        uint64_t query) {
    uint32_t scales[2][kScoreGroups / 4];
#pragma unroll
    for (int i = 0; i < kScoreGroups / 2; ++i)
      scales[i % 2][i / 2] = ptx::ld_shared_32(scales_at + i % 2 * 8 * V4Layout::kScaleBytes + i / 2 * 4);
    float s[kRegs];
    uint32_t a[2][16] = {};
    const auto collect = [&](int i) {  // the sums of group i
      wgmma_wait<0>(s);
      pin(a[i % 2]);
      const bool rope = i == kScoreGroups - 1 && kHasRope;
      const float upper = rope ? 1.0f : scale_of(scales[0][i / 4], i % 4);
      const float lower = rope ? 1.0f : scale_of(scales[1][i / 4], i % 4);
#pragma unroll
      for (int r = 0; r < kRegs; ++r)
        total[r] = i == 0 ? s[r] * (r % 4 < 2 ? upper : lower) : fmaf(s[r], r % 4 < 2 ? upper : lower, total[r]);
    };
#pragma unroll
    for (int i = 0; i < kScoreGroups; ++i) {
      uint32_t (&x)[16] = a[i % 2];
      const uint32_t row = rows + i * kQuantGroup;
      const uint64_t q = query + descriptor_step(i * kHeads * kRowBytes);
      const uint4 upper = ptx::ld_shared(row), lower = ptx::ld_shared(row + kLower);
      if (i < kScoreGroups - 1 || !kHasRope) {
        const uint32_t up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[4 * j] = ptx::low_e4m3x2_to_f16x2(up[j]);
          x[4 * j + 1] = ptx::low_e4m3x2_to_f16x2(low[j]);
          x[4 * j + 2] = ptx::high_e4m3x2_to_f16x2(up[j]);
          x[4 * j + 3] = ptx::high_e4m3x2_to_f16x2(low[j]);
        }
        if (i > 0) collect(i - 1);
        pin(x);
        wgmma_begin(s);
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma_f16(s, x + 4 * j, q + descriptor_step(j * 32), j > 0);
      } else {
        x[0] = upper.x, x[1] = lower.x, x[2] = upper.y, x[3] = lower.y;
        x[4] = upper.z, x[5] = lower.z, x[6] = upper.w, x[7] = lower.w;
        if (i > 0) collect(i - 1);
        pin(x);
        const uint4 upper2 = ptx::ld_shared(row + 64), lower2 = ptx::ld_shared(row + kLower + 64);
        x[8] = upper2.x, x[9] = lower2.x, x[10] = upper2.y, x[11] = lower2.y;
        x[12] = upper2.z, x[13] = lower2.z, x[14] = upper2.w, x[15] = lower2.w;
        pin(x);
        wgmma_begin(s);
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma_bf16(s, x + 4 * j, q + descriptor_step(j * 32), j > 0);
      }
      wgmma_commit();
    }
    collect(kScoreGroups - 1);
  }

  template <int kPart>
  __device__ __forceinline__ static uint64_t query_of(const Shared& shared) {
    return operand_descriptor(ptx::shared_address(shared.q)) +
           descriptor_step(kPart * kScoreGroups * kHeads * kRowBytes);
  }

  // A tile's scores of a warpgroup's half of the channels, to the weighing warps.
  template <int kPart>
  __device__ __forceinline__ static void score_tile(const Turn& turn, uint64_t query, Shared& shared) {
    constexpr int kFirst = kPart * kScoreGroups;
    const auto& tile = shared.tiles[0];
    // Read anew, so that what is made of it takes no registers from one tile to the next.
    const int thread = ptx::thread_of_block() % kWarpgroupThreads;
    const int lane = thread % 32, key = thread / 32 * 16 + lane / 4;
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
    const uint32_t rows = ptx::shared_address(tile.rows) + raw_offset(key, lane % 4) + kFirst * kQuantGroup;
    float total[kRegs];
    compute_scores<kPart == 1>(total, rows + turn.tile_at(shared),
                               ptx::shared_address(&tile.scales[key][kFirst]) + turn.tile_at(shared), query);
    if (turn.tile >= 1) ptx::bar_sync(kScoresEmpty, kScoresThreads);
    const uint32_t scores = ptx::shared_address(&shared.scores[kPart][lane % 4 * 2][key]);
#pragma unroll
    for (int r = 0; r < kRegs; ++r)
      ptx::st_shared(scores + ((r / 4 * 8 + r % 2) * kScorePitch + r / 2 % 2 * 8) * 4, total[r]);
    ptx::bar_arrive(kScoresFull, kScoresThreads);
  }

  // A warpgroup's half of the channels. The second has the RoPE part: a function for each, since a branch about it in
  // the loop makes the assembler serialise the products of 32 heads (C7512).
  template <int kPart>
  __device__ __forceinline__ static void attend_scores(int tiles, Shared& shared) {
    const uint64_t query = query_of<kPart>(shared);
#pragma unroll 1
    for (Turn turn; turn.tile < tiles; turn.advance()) {
      score_tile<kPart>(turn, query, shared);
      if (turn.tile + kRawStages < tiles) ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
    }
    ptx::bar_sync(kConsumersMeet, kEndThreads);  // between two setmaxnreg the warps of a warpgroup have to meet
  }

  // ---- values ----

  using Output = float[kValueBlocks][kRegs];

  // Which values a warp adds up, and where it finds them.
  struct ValuePlace {
    int first;  // of its blocks of 64 channels
    int lane;
    bool has_rope;
    uint32_t rows, rope_rows, factors;
    uint64_t weights;

    __device__ __forceinline__ ValuePlace(const Shared& shared, int warp, int lane) : lane(lane) {
      const auto& tile = shared.tiles[0];
      first = warp / 4 * kValueBlocks;
      has_rope = first + kValueBlocks > kNumScales;
      // Where the row of a matrix begins that the lane names. Codes: matrix m of four has keys 8 m .. 8 m + 7 of 16
      // channels. RoPE: eight channels and the next eight of eight keys, then of the next eight.
      rows = ptx::shared_address(tile.rows) + raw_offset(lane, first * 4 + warp % 4);
      rope_rows = ptx::shared_address(tile.rows) +
                  raw_offset(lane / 16 * 8 + lane % 8, kRopeChunk + warp % 4 * 2 + lane / 8 % 2);
      factors = ptx::shared_address(tile.factors[first]) + lane % 4 * (kTileKeys / 4) * 2;
      weights = operand_descriptor(ptx::shared_address(shared.weights[0]));
    }
  };

  __device__ __forceinline__ static void add_tile(Output& o, const ValuePlace& at, const Turn& turn,
                                                  const Shared& shared) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[turn.stage]), turn.stage_parity);
    ptx::mbarrier_wait(ptx::shared_address(&shared.weights_full[turn.buffer()]), turn.buffer_parity());
#pragma unroll
    for (int n = 0; n < kHeads / 8; ++n) {
      const float2 decay = *reinterpret_cast<const float2*>(&shared.decay[turn.buffer()][8 * n + at.lane % 4 * 2]);
#pragma unroll
      for (int b = 0; b < kValueBlocks; ++b) {
#pragma unroll
        for (int r = 0; r < 4; ++r) o[b][4 * n + r] *= r % 2 == 0 ? decay.x : decay.y;
      }
    }
    uint32_t a[2][8];
#pragma unroll
    for (int step = 0; step < 2 * kValueBlocks; ++step) {  // 32 keys of a block of 64 channels
      const int b = step / 2, half = step % 2;
      uint32_t (&x)[8] = a[half];
      const uint4 f = ptx::ld_shared(at.factors + turn.tile_at(shared) + b * kTileKeys * 2 + half * 16);
      const uint32_t factor[4] = {f.x, f.y, f.z, f.w};
      if (b < kValueBlocks - 1 || !at.has_rope) {
        const uint4 v =
            ptx::ldmatrix_trans(at.rows + turn.tile_at(shared) + b * kQuantGroup + half * 32 * kRawRowBytes);
        if (b > 0) wgmma_wait<1>(x);
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[2 * i] = ptx::mul_bf16x2(even_channel(pairs[i]), factor[i]);
          x[2 * i + 1] = ptx::mul_bf16x2(odd_channel(pairs[i]), factor[i]);
        }
      } else {
        const uint32_t rope = at.rope_rows + turn.tile_at(shared) + half * 32 * kRawRowBytes;
        const uint4 v = ptx::ldmatrix_trans(rope), u = ptx::ldmatrix_trans(rope + 16 * kRawRowBytes);
        wgmma_wait<1>(x);
        const uint32_t pairs[8] = {v.x, v.y, v.z, v.w, u.x, u.y, u.z, u.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = ptx::mul_bf16x2(pairs[i], factor[i / 2]);
      }
      pin(x);
      wgmma_begin(o[b]);
      const uint64_t p = at.weights + descriptor_step(turn.buffer() * static_cast<int>(sizeof(shared.weights[0])));
      wgmma_bf16(o[b], x, p + descriptor_step(half * 64), true);
      wgmma_bf16(o[b], x + 4, p + descriptor_step(half * 64 + 32), true);
      wgmma_commit();
    }
    wgmma_wait<0>(o[kValueBlocks - 1]);
#pragma unroll
    for (int b = 0; b < kValueBlocks - 1; ++b) pin(o[b]);
    pin(a[0]);
    pin(a[1]);
  }

  // Leaves the results in shared memory.
  __device__ __forceinline__ static void attend_values(int tiles, Shared& shared, int warp, int lane) {
    const ValuePlace place(shared, warp, lane);
    Output o = {};  // the first tile's decay is 0
#pragma unroll 1
    for (Turn turn; turn.tile < tiles; turn.advance()) {
      add_tile(o, place, turn, shared);
      if (turn.tile + 2 < tiles) ptx::bar_arrive(kWeightsEmpty + turn.buffer(), kWeightsThreads);
      if (turn.tile + kRawStages < tiles) ptx::bar_arrive(kEmpty + turn.stage, kRawThreads);
    }

    ptx::bar_sync(kConsumersMeet, kEndThreads);
    const int g = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int b = 0; b < kValueBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kRegs / 2; ++i) {
        const float upper = o[b][i / 2 * 4 + i % 2], lower = o[b][i / 2 * 4 + i % 2 + 2];
        float* row = shared.results[i / 2 * 8 + column + i % 2] + (place.first + b) * kQuantGroup + warp % 4 * 16;
        if (b < kValueBlocks - 1 || !place.has_rope) {
          *reinterpret_cast<float2*>(row + 2 * g) = make_float2(upper, lower);
        } else {
          row[g] = upper;
          row[g + 8] = lower;
        }
      }
    }
  }

  // ---- scoring and value warps ----

  // Leaves the results in shared memory.
  __device__ __forceinline__ static Done attend_tiles(const DecodeParams& p, const Part& part,
                                                      const Lengths& /* the weighing warps read them */,
                                                      Shared& shared) {
    const int warp = my_warp(), lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t* position_at = query::find_position(p.query, part.token);
    const __nv_bfloat16* heads_at[kQueryHeads];
#pragma unroll
    for (int i = 0; i < kQueryHeads; ++i) heads_at[i] = find_head(p, part, warp + i * kAttendWarps, lane);
    const QueryPlace query_place(shared, warp, lane);
    if (warp >= kScoreThreads / 32) move_registers<kRawLaunchRegisters, kFewEarlyValueRegisters<kHeads>>();
    ptx::griddepcontrol_wait();

    const query::Position position = query::load_position(p.query, position_at, p.query.freqs_cis != nullptr);
    query::Values heads[kQueryHeads];
#pragma unroll
    for (int i = 0; i < kQueryHeads; ++i) heads[i] = load_head(p, heads_at[i]);
    __syncwarp();  // keeps the loads here
    const bool rotates = p.query.freqs_cis != nullptr && lane >= query::kFirstRopeLane;
    query::Factors factors = {};
    if (rotates) factors = query::load_factors<false>(p.query, position, lane - query::kFirstRopeLane);
    store_heads<kQueryHeads, kAttendWarps>(p, heads, rotates, factors, query_place, shared.q_scale + warp, lane);
    ptx::fence_proxy_async();
    if (p.o_accum == nullptr && warp >= kAttendWarps - kRopeDim / 32)
      load_rotation(p.finish, part, static_cast<int>(threadIdx.x) - (kAttendThreads - kRopeDim), shared.rotation);
    ptx::bar_sync(kQueryStored, kQueryThreads);
    const int tiles = shared.num_tiles;
    if (tiles == 0) return Done::kEmpty;
    if (warp < kScoreThreads / 32) {
      move_registers<kRawLaunchRegisters, kFewScoreRegisters<kHeads>>();
      if (warp < kWarpgroupThreads / 32) {
        attend_scores<0>(tiles, shared);
      } else {
        attend_scores<1>(tiles, shared);
      }
      move_registers<kFewScoreRegisters<kHeads>, kRawLaunchRegisters>();
    } else {
      move_registers<kFewEarlyValueRegisters<kHeads>, kFewValueRegisters<kHeads>>();
      attend_values(tiles, shared, warp - kScoreThreads / 32, lane);
      move_registers<kFewValueRegisters<kHeads>, kRawLaunchRegisters>();
    }
    return Done::kStaged;
  }

  template <int kFrom, int kTo>
  __device__ __forceinline__ static void move_registers() {
    if constexpr (kTo > kFrom) ptx::setmaxnreg_inc<kTo>();
    if constexpr (kTo < kFrom) ptx::setmaxnreg_dec<kTo>();
  }
};

}  // namespace sgl_dsv4::sm90
