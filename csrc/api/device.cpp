#include "api/device.h"

#include <dlfcn.h>

#include <atomic>

#include "common/launch.h"
#include "store/norm_rope_store.h"

#ifndef SGL_DSV4_ARCHS
#error "SGL_DSV4_ARCHS: the build passes the list of CUDA architectures"
#endif

namespace sgl_dsv4::api {
namespace {

// aoti_torch_get_current_cuda_stream exists only in CUDA builds of torch, so it is resolved at run time: a hard
// reference would keep the extension from loading beside a CPU torch.
using GetStream = AOTITorchError (*)(int32_t device, void** stream);

GetStream find_get_stream() {
  const char* name = "aoti_torch_get_current_cuda_stream";
  if (void* f = dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<GetStream>(f);
  // torch loads its libraries without exporting their symbols globally.
  if (void* lib = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD))
    if (void* f = dlsym(lib, name)) return reinterpret_cast<GetStream>(f);
  return nullptr;
}

}  // namespace

cudaStream_t current_stream(int32_t device) {
  static const GetStream get_stream = find_get_stream();
  check(get_stream != nullptr, "this torch has no CUDA support (aoti_torch_get_current_cuda_stream not found)");
  void* stream = nullptr;
  check(get_stream(device, &stream) == AOTI_TORCH_SUCCESS, "torch could not give the current stream of cuda:", device);
  return static_cast<cudaStream_t>(stream);
}

void require_device_code(int32_t device) {
  static std::atomic<bool> known_good[kMaxDevices];
  if (device < kMaxDevices && known_good[device].load(std::memory_order_relaxed)) return;
  const cudaError_t status = store_device_code();
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion || status == cudaErrorInvalidKernelImage) {
    (void)cudaGetLastError();
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    fail("cuda:", device, " is sm_", major, minor, ", and this build holds code for ", SGL_DSV4_ARCHS, " only (",
         cudaGetErrorString(status), "); rebuild with SGL_DSV4_CUDA_ARCHS naming this architecture");
  }
  check(status == cudaSuccess, "cuda:", device, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
  if (device < kMaxDevices) known_good[device].store(true, std::memory_order_relaxed);
}

void check_launch(const char* kernel, cudaError_t status) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // a failed launch is reported here, not again by somebody else's check
  fail(kernel, ": launch failed: ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
}

}  // namespace sgl_dsv4::api
