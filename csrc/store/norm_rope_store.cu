// One warp stores one row; a block of K warps stores K rows (K = 4, and K = 1 where K = 4 would leave SMs idle).
//
// Paragraphs of the kernel:
//   1. weight: constant data, loaded before the wait on the previous grid;
//   2. resolve: position and slot of the row; nothing else is read for a row that writes nothing;
//   3. load: the row (streamed, it is read once) and its RoPE factors, all in flight together;
//   4. norm: sum of squares in SGLang's order (lane_map.cuh), rsqrt, weight;
//   5. store: quantise and write the nope part, rotate and write the rope part.
//
// Numerics (a contract: byte-identical to SGLang 0.5.17's compress_norm_rope_store and fused_k_norm_rope_flashmla):
// the fused multiply-adds are written out, everything else is __fmul_rn / __fadd_rn, so no compiler flag or unrolling
// can contract them otherwise. The compressed entries round the nope part to bf16 before amax and quantisation, the main
// entry does not. The rope part is rotated from the unrounded values.
#include "store/norm_rope_store.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "store/lane_map.cuh"

namespace sgl_dsv4 {
namespace {

constexpr float kE4m3Max = 448.0f;
constexpr float kAmaxFloor = 1e-4f;

__device__ __forceinline__ int64_t load_index(const void* p, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

// ---- 16-byte vectors of the input type

template <typename T>
struct Vector {
  static constexpr int kSize = 16 / sizeof(T);
  uint4 bits;
  __device__ __forceinline__ float2 pair(int i) const {
    const uint32_t* word = reinterpret_cast<const uint32_t*>(&bits);
    if constexpr (std::is_same_v<T, float>) {
      return make_float2(__uint_as_float(word[2 * i]), __uint_as_float(word[2 * i + 1]));
    } else {  // bf16 is the upper half of an fp32
      return make_float2(__uint_as_float(word[i] << 16), __uint_as_float(word[i] & 0xffff0000u));
    }
  }
};

enum class Reuse { kStreamed, kKept };

template <Reuse kReuse, bool kAligned, typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* p) {
  Vector<T> v;
  if constexpr (kAligned) {
    const uint4* wide = reinterpret_cast<const uint4*>(p);
    v.bits = kReuse == Reuse::kStreamed ? __ldcs(wide) : *wide;
  } else {
    T* out = reinterpret_cast<T*>(&v.bits);
#pragma unroll
    for (int i = 0; i < Vector<T>::kSize; ++i) out[i] = p[i];
  }
  return v;
}

template <bool kAligned, typename Packed>
__device__ __forceinline__ void store_vector(uint8_t* p, const Packed& v) {
  if constexpr (kAligned) {
    *reinterpret_cast<Packed*>(p) = v;
  } else {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&v);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Packed)); ++i) p[i] = bytes[i];
  }
}

template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t word[kWords];
};

// ---- conversions

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ float2 round_to_bf16(float2 v) {
  const uint32_t bits = pack_bf16(v.x, v.y);
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
// fminf / fmaxf turn NaN into +448 here, and SGLang's bytes depend on it.
__device__ __forceinline__ float clamp_e4m3(float x) { return fmaxf(fminf(x, kE4m3Max), -kE4m3Max); }
__device__ __forceinline__ uint32_t pack_e4m3(float2 v, float inverse_scale) {
  const float2 scaled = make_float2(clamp_e4m3(__fmul_rn(v.x, inverse_scale)), clamp_e4m3(__fmul_rn(v.y, inverse_scale)));
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
}
// Smallest power of two that is at least amax / 448, as a biased exponent; 255 for an infinite amax.
__device__ __forceinline__ int ue8m0_scale(float amax) {
  const uint32_t bits = __float_as_uint(__fdiv_rn(fmaxf(kAmaxFloor, amax), kE4m3Max));
  return static_cast<int>(bits >> 23 & 0xff) + ((bits & 0x7fffff) != 0);
}
// 2^(127 - exponent). For exponent 255 the bits of -inf come out, as in SGLang.
__device__ __forceinline__ float inverse_ue8m0(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
}
__device__ __forceinline__ float2 rotate(float2 x, float2 f) {
  return make_float2(__fmaf_rn(x.x, f.x, -__fmul_rn(x.y, f.y)), __fmaf_rn(x.x, f.y, __fmul_rn(x.y, f.x)));
}

// ---- 2. resolve

struct Row {
  int64_t position;
  int64_t slot;
  bool stored;
};

template <StoreEntry kEntry>
__device__ __forceinline__ Row resolve_row(const StoreParams& p, int64_t i) {
  Row row = {-1, -1, false};
  if (i >= p.num_tokens) return row;
  int64_t slot_index = i;
  if constexpr (kEntry == StoreEntry::kMain) {
    row.position = load_index(p.positions, p.positions_are_int64, i);
  } else {
    const uint4 plan = p.plan[i];
    const uint32_t seq_len = plan.x;
    row.position = static_cast<int64_t>(seq_len) - p.compress_ratio;
    bool wanted = seq_len != 0xffffffffu;
    if constexpr (kEntry == StoreEntry::kCompressDecode) {
      wanted = wanted && seq_len % p.compress_ratio == 0;
    } else {
      slot_index = plan.y & 0xffffu;
      wanted = wanted && slot_index < p.num_slots;
    }
    if (!wanted) return row;
  }
  row.slot = load_index(p.slots, p.slots_are_int64, slot_index);
  row.stored = row.position >= 0 && row.position < p.num_positions && row.slot >= 0 && row.slot < p.num_slots_in_cache;
  return row;
}

// ---- 5. store

// `x` = the lane's 8 pairs after the norm, in element order; `freq` = the RoPE factors of its last vector's pairs.
template <StoreEntry kEntry, bool kAligned, int kPerVector, int kPairs>
__device__ __forceinline__ void store_v4(uint8_t* page, int64_t offset, int page_bits, const float2 (&x)[8],
                                         const float2 (&freq)[kPairs], int lane) {
  using Map = LaneMap<kPerVector>;
  constexpr int kLast = Map::kVectors - 1;
  uint8_t* row = page + offset * V4Layout::kDataBytes;
  const bool is_rope = Map::group(kLast, lane) == kNumScales;

  if (is_rope) {
    Words<kPairs> out;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 r = rotate(x[kLast * kPairs + i], freq[i]);
      out.word[i] = pack_bf16(r.x, r.y);
    }
    const int element = kLast * 32 * kPerVector + lane * kPerVector;
    store_vector<kAligned>(row + V4Layout::kRopeOffset + (element - kNopeDim) * 2, out);
  }

  float2 q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] = kEntry == StoreEntry::kMain ? x[i] : round_to_bf16(x[i]);
  float vector_amax[Map::kVectors];
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v) {
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 pair = q[v * kPairs + i];
      m = fmaxf(m, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    vector_amax[v] = m;
  }
  const int exponent = ue8m0_scale(Map::group_amax(vector_amax, lane));
  const float inverse_scale = inverse_ue8m0(exponent);
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v) {
    const float inverse = __shfl_sync(kFullWarp, inverse_scale, Map::amax_lane(v, lane));
    Words<kPerVector / 4> out;
#pragma unroll
    for (int w = 0; w < kPerVector / 4; ++w) {
      const int first = v * kPairs + 2 * w;
      out.word[w] = pack_e4m3(q[first], inverse) | pack_e4m3(q[first + 1], inverse) << 16;
    }
    if (v < kLast || !is_rope) store_vector<kAligned>(row + v * 32 * kPerVector + lane * kPerVector, out);
  }
  const int group = Map::amax_group(lane);
  if (lane % Map::kAmaxReplicas == 0 && group < kNumScales) {
    page[(static_cast<int64_t>(V4Layout::kDataBytes) << page_bits) + offset * V4Layout::kScaleBytes + group] =
        static_cast<uint8_t>(exponent);
  }
}

template <bool kAligned, int kPerVector, int kPairs>
__device__ __forceinline__ void store_bf16(uint8_t* page, int64_t offset, const float2 (&x)[8],
                                           const float2 (&freq)[kPairs], int lane) {
  using Map = LaneMap<kPerVector>;
  uint8_t* row = page + offset * Bf16Layout::kDataBytes;
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v) {
    const bool is_rope = Map::group(v, lane) == kNumScales;
    Words<kPairs> out;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float2 r = x[v * kPairs + i];
      if (is_rope) r = rotate(r, freq[i]);
      out.word[i] = pack_bf16(r.x, r.y);
    }
    store_vector<kAligned>(row + (v * 32 * kPerVector + lane * kPerVector) * 2, out);
  }
}

// ---- the kernel

template <typename T, StoreEntry kEntry, CacheLayout kLayout, int kTokensPerBlock, bool kAligned>
__global__ void __launch_bounds__(32 * kTokensPerBlock)
    norm_rope_store_kernel(const __grid_constant__ StoreParams p) {
  constexpr int kPerVector = Vector<T>::kSize;
  constexpr int kPairs = kPerVector / 2;
  using Map = LaneMap<kPerVector>;
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokensPerBlock + threadIdx.x / 32;

  // 1. weight
  Vector<T> weight[Map::kVectors];
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v)
    weight[v] = load_vector<Reuse::kKept, kAligned>(static_cast<const T*>(p.weight) + (v * 32 + lane) * kPerVector);

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // 2. resolve
  const Row row = resolve_row<kEntry>(p, token);
  if (!row.stored) return;

  // 3. load
  const T* kv = static_cast<const T*>(p.kv) + token * p.stride_kv_row;
  Vector<T> input[Map::kVectors];
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v)
    input[v] = load_vector<Reuse::kStreamed, kAligned>(kv + (v * 32 + lane) * kPerVector);
  float2 freq[kPairs];
  if (Map::group(Map::kVectors - 1, lane) == kNumScales) {
    const int element = (Map::kVectors - 1) * 32 * kPerVector + lane * kPerVector - kNopeDim;
    const float* f = p.freqs_cis + row.position * p.stride_freqs_row + element;
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
      const Vector<float> four = load_vector<Reuse::kKept, kAligned>(f + 2 * i);
      freq[i] = four.pair(0);
      freq[i + 1] = four.pair(1);
    }
  }

  // 4. norm
  float2 x[8];
  float pair_sum[8];
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 pair = input[v].pair(i);
      x[v * kPairs + i] = pair;
      pair_sum[v * kPairs + i] = __fmaf_rn(pair.y, pair.y, __fmul_rn(pair.x, pair.x));
    }
  }
  const float norm = rsqrtf(__fmaf_rn(sum_of_pairs<kPerVector>(pair_sum, lane), 1.0f / kHeadDim, p.eps));
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 w = weight[v].pair(i);
      float2& pair = x[v * kPairs + i];
      pair = make_float2(__fmul_rn(__fmul_rn(pair.x, norm), w.x), __fmul_rn(__fmul_rn(pair.y, norm), w.y));
    }
  }

  // 5. store
  const int64_t offset = row.slot & ((int64_t{1} << p.page_bits) - 1);
  uint8_t* page = p.cache + (row.slot >> p.page_bits) * p.stride_cache_page;
  if constexpr (kLayout == CacheLayout::kV4) {
    store_v4<kEntry, kAligned, kPerVector>(page, offset, p.page_bits, x, freq, lane);
  } else {
    store_bf16<kAligned, kPerVector>(page, offset, x, freq, lane);
  }
}

// ---- dispatch

using StoreKernel = void (*)(StoreParams);

template <typename T, StoreEntry kEntry, CacheLayout kLayout>
StoreKernel select_width(const StoreConfig& c) {
  if (!c.aligned) return norm_rope_store_kernel<T, kEntry, kLayout, 1, false>;
  return c.tokens_per_block == 4 ? norm_rope_store_kernel<T, kEntry, kLayout, 4, true>
                                 : norm_rope_store_kernel<T, kEntry, kLayout, 1, true>;
}
template <typename T, StoreEntry kEntry>
StoreKernel select_layout(const StoreConfig& c) {
  return c.layout == CacheLayout::kV4 ? select_width<T, kEntry, CacheLayout::kV4>(c)
                                      : select_width<T, kEntry, CacheLayout::kBf16>(c);
}
template <typename T>
StoreKernel select_entry(const StoreConfig& c) {
  switch (c.entry) {
    case StoreEntry::kMain: return select_layout<T, StoreEntry::kMain>(c);
    case StoreEntry::kCompressDecode: return select_layout<T, StoreEntry::kCompressDecode>(c);
    case StoreEntry::kCompressExtend: return select_layout<T, StoreEntry::kCompressExtend>(c);
  }
  return nullptr;
}
StoreKernel select_kernel(const StoreConfig& c) {
  return c.input_is_fp32 ? select_entry<float>(c) : select_entry<__nv_bfloat16>(c);
}

// Rows an SM needs before K = 4 pays (TODO measured).
constexpr int kRowsPerSmForFour = 8;

}  // namespace

int choose_tokens_per_block(int64_t num_tokens, int sm_count) {
  return num_tokens >= static_cast<int64_t>(kRowsPerSmForFour) * sm_count ? 4 : 1;
}

cudaError_t launch_norm_rope_store(const StoreConfig& config, const StoreParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  StoreConfig c = config;
  if (!c.aligned) {
    c.tokens_per_block = 1;
  } else if (c.tokens_per_block == 0) {
    DeviceFacts facts;
    if (cudaError_t err = device_facts(&facts); err != cudaSuccess) return err;
    c.tokens_per_block = choose_tokens_per_block(params.num_tokens, facts.sm_count);
  }
  const unsigned blocks = (static_cast<unsigned>(params.num_tokens) + c.tokens_per_block - 1) / c.tokens_per_block;
  return launch_kernel(select_kernel(c), dim3(blocks), dim3(32 * c.tokens_per_block), 0, c.pdl, stream, params);
}

cudaError_t store_device_code() {
  cudaFuncAttributes attributes;
  const StoreKernel kernel = norm_rope_store_kernel<__nv_bfloat16, StoreEntry::kMain, CacheLayout::kV4, 1, true>;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

}  // namespace sgl_dsv4
