// Descriptions of tensors for the copy engine (CUDA driver API, "Tensor Map Object Management").
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace sgl_dsv4 {

// A tensor of bf16, four dimensions, the fastest first: extents, and strides in bytes of all but the first. Base and
// strides are multiples of 16 bytes. A stride may be smaller than the one before it: the documentation speaks of
// strides that grow, drivers up to 580 do not ask for it, and one that did would answer cudaErrorNotSupported below.
struct Tensor4 {
  void* base;
  cuuint64_t extent[4];
  cuuint64_t stride[3];
};

// Boxes of `box` elements; in shared memory the eight 16-byte chunks of row r of 128 bytes stand in the order chunk ^ r
// % 8. cudaErrorNotSupported if the runtime (12.5 or newer) or the driver has no tensor maps, or refuses this one.
inline cudaError_t make_tensor_map(CUtensorMap* map, const Tensor4& tensor, const cuuint32_t (&box)[4]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t err =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (err != cudaSuccess) (void)cudaGetLastError();  // nobody else's
    return err == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, tensor.base, tensor.extent, tensor.stride,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace sgl_dsv4
