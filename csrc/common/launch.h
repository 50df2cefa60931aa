// Launching a kernel on a stream, with or without programmatic dependent launch. No torch here.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace sgl_dsv4 {

inline constexpr int kMaxDevices = 64;

struct DeviceFacts {
  int sm_count = 0;
  int threads_per_sm = 0;  // resident at once
};

// Facts about the current device, asked once.
inline cudaError_t device_facts(DeviceFacts* facts) {
  static std::atomic<int64_t> cached[kMaxDevices];  // threads_per_sm << 32 | sm_count; 0 = not asked yet
  int device = 0;
  if (cudaError_t err = cudaGetDevice(&device); err != cudaSuccess) return err;
  int64_t packed = device < kMaxDevices ? cached[device].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int sms = 0, threads = 0;
    if (cudaError_t err = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device); err != cudaSuccess)
      return err;
    if (cudaError_t err = cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device);
        err != cudaSuccess)
      return err;
    packed = static_cast<int64_t>(threads) << 32 | sms;
    if (device < kMaxDevices) cached[device].store(packed, std::memory_order_relaxed);
  }
  facts->sm_count = static_cast<int>(packed & 0xffffffff);
  facts->threads_per_sm = static_cast<int>(packed >> 32);
  return cudaSuccess;
}

// Loads a kernel's code on the current device; a launch inside a graph capture may not.
template <typename Params>
inline cudaError_t load_code(void (*kernel)(Params)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

// Calls `prepare` unless it has succeeded on the current device before. It is known by its type: pass a lambda.
template <typename Prepare>
inline cudaError_t once_a_device(const Prepare& prepare) {
  static std::atomic<bool> done[kMaxDevices];
  int device = 0;
  if (cudaError_t err = cudaGetDevice(&device); err != cudaSuccess) return err;
  if (device < kMaxDevices && done[device].load(std::memory_order_relaxed)) return cudaSuccess;
  if (cudaError_t err = prepare(); err != cudaSuccess) return err;
  if (device < kMaxDevices) done[device].store(true, std::memory_order_relaxed);
  return cudaSuccess;
}

// Does the code that is loaded for `kernel` on the current device hold griddepcontrol.wait? It does when it was
// compiled for sm_90 or newer; PTX of an older target that the driver compiled for a new device does not. The first
// answer of a device is kept for all kernels of that type: they come from one compilation for one list of targets.
template <typename Kernel>
inline cudaError_t has_grid_dependency_wait(Kernel* kernel, bool* yes) {
  static std::atomic<signed char> cached[kMaxDevices];  // 0 = not asked yet, 1 = no, 2 = yes
  int device = 0;
  if (cudaError_t err = cudaGetDevice(&device); err != cudaSuccess) return err;
  signed char state = device < kMaxDevices ? cached[device].load(std::memory_order_relaxed) : 0;
  if (state == 0) {
    cudaFuncAttributes attributes;
    if (cudaError_t err = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)); err != cudaSuccess)
      return err;
    state = attributes.ptxVersion >= 90 ? 2 : 1;
    if (device < kMaxDevices) cached[device].store(state, std::memory_order_relaxed);
  }
  *yes = state == 2;
  return cudaSuccess;
}

// Launches `kernel(params)`, in clusters of so many blocks. With `pdl` the grid may start before its predecessor in the
// stream has finished: the kernel must execute griddepcontrol.wait in every block before it reads anything that is not
// constant.
template <typename Params>
inline cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes, bool pdl,
                                 cudaStream_t stream, const Params& params, int cluster = 1) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  if (pdl) {
    bool has_wait = false;
    if (cudaError_t err = has_grid_dependency_wait(kernel, &has_wait); err != cudaSuccess) return err;
    if (has_wait) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace sgl_dsv4
