// What both store kernels share: which row goes where, and the arithmetic of one pair of values.
//
// Numerics are a contract: byte-identical to SGLang 0.5.17's compress_norm_rope_store and fused_k_norm_rope_flashmla.
// Fused multiply-adds are written out and everything else is __fmul_rn / __fadd_rn, so that neither a compiler flag nor
// unrolling can contract them otherwise. The compressed entries round the nope part to bf16 before amax and
// quantisation, the main entry does not. The rope part is rotated from the unrounded values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "common/ptx.cuh"
#include "store/norm_rope_store.h"

namespace sgl_dsv4 {

inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr float kAmaxFloor = 1e-4f;
inline constexpr float kE4m3Max = 448.0f;

// ---- position and slot

// Positions, slots and token numbers are 32 bits wide in the kernels (the launcher refuses larger tables and caches);
// what does not fit, or is negative, becomes a number that lies outside every table.
struct Row {
  uint32_t position;
  uint32_t slot;
  bool wanted;  // by the plan; position and slot may still be out of range

  __device__ __forceinline__ bool has_frequencies(const StoreParams& p) const { return position < p.num_positions; }
  __device__ __forceinline__ bool is_stored(const StoreParams& p) const {
    return wanted && has_frequencies(p) && slot < p.num_slots_in_cache;
  }
};

// Types of the index tensors, at compile time: nothing branches ahead of the first fetches.
template <bool kPositionsAreInt64, bool kSlotsAreInt64>
struct IndexTypes {
  static constexpr bool kPositions64 = kPositionsAreInt64;  // kMain only
  static constexpr bool kSlots64 = kSlotsAreInt64;
};

// An index as it lies in memory. Turning it into 32 bits is a step of its own: inside the load it would make the next
// load wait for this one.
template <bool kIsInt64>
struct RawIndex {
  std::conditional_t<kIsInt64, uint2, uint32_t> bits;
  __device__ __forceinline__ uint32_t value() const {
    if constexpr (kIsInt64) {
      return bits.y == 0 ? bits.x : 0xffffffffu;
    } else {
      return bits;
    }
  }
};
template <bool kIsInt64>
__device__ __forceinline__ RawIndex<kIsInt64> load_index(const void* p, uint32_t i) {
  return static_cast<const RawIndex<kIsInt64>*>(p)[i];
}

// Row i, i < num_tokens. Loads that do not depend on each other are issued together; only a CompressPlan's slot waits
// for its plan. An invalid record (seq_len 0xffffffff) has a position past every table.
template <StoreEntry kEntry, typename Index>
__device__ __forceinline__ Row resolve_row(const StoreParams& p, uint32_t i) {
  Row row;
  if constexpr (kEntry == StoreEntry::kMain) {
    const auto position = load_index<Index::kPositions64>(p.positions, i);
    const auto slot = load_index<Index::kSlots64>(p.slots, i);
    row.position = position.value();
    row.slot = slot.value();
    row.wanted = true;
  } else if constexpr (kEntry == StoreEntry::kCompressDecode) {
    const uint32_t seq_len = p.plan[i].x;
    row.slot = load_index<Index::kSlots64>(p.slots, i).value();
    row.position = seq_len - p.compress_ratio;
    row.wanted = seq_len * p.ratio_reciprocal <= p.ratio_reciprocal - 1;  // seq_len is a multiple of the ratio
  } else {
    const uint2 plan = *reinterpret_cast<const uint2*>(p.plan + i);
    const uint32_t ragged_id = plan.y & 0xffffu;
    row.position = plan.x - p.compress_ratio;
    row.wanted = row.has_frequencies(p) && ragged_id < p.num_slots;
    row.slot = row.wanted ? load_index<Index::kSlots64>(p.slots, ragged_id).value() : 0xffffffffu;
  }
  return row;
}

// Page of a slot, and the offsets of the slot's bytes in it.
struct Destination {
  uint8_t* page;
  uint32_t data_offset;
  uint32_t scale_offset;  // V4
};
template <typename Layout>
__device__ __forceinline__ Destination destination(const StoreParams& p, uint32_t slot) {
  const uint32_t in_page = slot & ((1u << p.page_bits) - 1);
  return {p.cache + static_cast<int64_t>(slot >> p.page_bits) * p.stride_cache_page, in_page * Layout::kDataBytes,
          p.scale_offset + in_page * Layout::kScaleBytes};
}

template <typename T>
__device__ __forceinline__ const T* row_of(const StoreParams& p, uint32_t token) {
  return static_cast<const T*>(p.kv) + static_cast<uint64_t>(token) * p.stride_kv_row;
}
__device__ __forceinline__ const float* freqs_of(const StoreParams& p, const Row& row) {
  return p.freqs_cis + static_cast<uint64_t>(row.position) * kRopeDim;
}

// ---- loads and stores

// 2 or 4 consecutive words of the input; bf16 is the upper half of an fp32.
template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t word[kWords];
};
template <typename T, int kWords>
__device__ __forceinline__ float2 pair_of(const Words<kWords>& w, int i) {
  if constexpr (std::is_same_v<T, float>) {
    return make_float2(__uint_as_float(w.word[2 * i]), __uint_as_float(w.word[2 * i + 1]));
  } else {
    return make_float2(__uint_as_float(w.word[i] << 16), __uint_as_float(w.word[i] & 0xffff0000u));
  }
}

enum class Reuse { kStreamed, kKept };  // streamed: read once, first to leave the caches

template <int kWords, Reuse kReuse, bool kAligned, typename T>
__device__ __forceinline__ Words<kWords> load_words(const T* p) {
  Words<kWords> v;
  if constexpr (!kAligned) {
    T* out = reinterpret_cast<T*>(v.word);
#pragma unroll
    for (int i = 0; i < kWords * 4 / static_cast<int>(sizeof(T)); ++i) out[i] = p[i];
  } else if constexpr (kReuse == Reuse::kKept) {
    v = *reinterpret_cast<const Words<kWords>*>(p);
  } else if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(v.word) = __ldcs(reinterpret_cast<const uint4*>(p));
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(v.word) = __ldcs(reinterpret_cast<const uint2*>(p));
  } else {
    v.word[0] = __ldcs(reinterpret_cast<const uint32_t*>(p));
  }
  return v;
}

template <bool kAligned, typename Packed>
__device__ __forceinline__ void store_packed(uint8_t* p, const Packed& v) {
  if constexpr (kAligned) {
    *reinterpret_cast<Packed*>(p) = v;
  } else {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&v);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Packed)); ++i) p[i] = bytes[i];
  }
}

// ---- arithmetic

__device__ __forceinline__ float pair_square(float2 x) {
  return __fmaf_rn(x.y, x.y, __fmul_rn(x.x, x.x));
}
__device__ __forceinline__ float norm_factor(float sum_of_squares, float eps) {
  return rsqrtf(__fmaf_rn(sum_of_squares, 1.0f / kHeadDim, eps));
}
__device__ __forceinline__ float2 normalize(float2 x, float norm, float2 w) {
  return make_float2(__fmul_rn(__fmul_rn(x.x, norm), w.x), __fmul_rn(__fmul_rn(x.y, norm), w.y));
}
__device__ __forceinline__ float2 rotate(float2 x, float2 f) {
  return make_float2(__fmaf_rn(x.x, f.x, -__fmul_rn(x.y, f.y)), __fmaf_rn(x.x, f.y, __fmul_rn(x.y, f.x)));
}
__device__ __forceinline__ uint32_t pack_bf16(float2 x) {
  return ptx::cvt_bf16x2(x.x, x.y);
}
__device__ __forceinline__ float2 unpack_bf16(uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
// max(|a|, |b|), ignoring NaN.
__device__ __forceinline__ float abs_max(float a, float b) {
  return fmaxf(fabsf(a), fabsf(b));
}

// UE8M0 byte of the smallest power of two that is at least amax / 448, amax >= 1e-4. 448 = 1.75 * 2^8, so that is the
// exponent less 8, and one more above a mantissa of 1.75 (0x600000); test_store_cpu.py proves it equal to the IEEE
// division that SGLang makes. An infinite amax gives 255, as there.
__device__ __forceinline__ int ue8m0_scale(float amax) {
  const uint32_t bits = __float_as_uint(amax);
  return bits == 0x7f800000u ? 255 : static_cast<int>((bits + 0x1fffffu) >> 23) - 8;
}
// 2^(127 - exponent). For exponent 255 the bits of -inf come out, as in SGLang.
__device__ __forceinline__ float inverse_ue8m0(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
}
// Two e4m3 codes in the low half. A NaN gives 0x7f / 0xff, see below.
__device__ __forceinline__ uint32_t pack_e4m3(float2 x, float inverse_scale) {
  return __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(x.x, inverse_scale), __fmul_rn(x.y, inverse_scale)),
                                  __NV_SATFINITE, __NV_E4M3);
}
// SGLang clamps to +-448 with fminf / fmaxf before it converts, which stores a NaN as +448 (0x7e). The conversion
// itself saturates, so only NaN codes differ. Either the minimum is taken before the conversion, or the codes are
// mended: bit 7 of a byte of nan_codes() is set where that byte of `codes` is a NaN.
__device__ __forceinline__ uint32_t pack_e4m3_without_nan(float2 x, float inverse_scale) {
  return __nv_cvt_float2_to_fp8x2(
      make_float2(fminf(__fmul_rn(x.x, inverse_scale), kE4m3Max), fminf(__fmul_rn(x.y, inverse_scale), kE4m3Max)),
      __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ uint32_t nan_codes(uint32_t codes) {
  return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}
__device__ __forceinline__ uint32_t replace_nan_codes(uint32_t codes) {
  const uint32_t nan = nan_codes(codes) >> 7;
  return (codes & ~(nan * 0xffu)) | nan * 0x7eu;
}

}  // namespace sgl_dsv4
