// The caller's device and stream, and errors of launches. CUDA builds only.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "api/tensor_checks.h"

namespace sgl_dsv4::api {

using torch::stable::accelerator::DeviceGuard;

// torch's current stream of `device`.
cudaStream_t current_stream(int32_t device);

// Throws, naming device and binary, unless the binary holds code that the current device can run. Asked once a device.
void require_device_code(int32_t device);

// Throws with CUDA's text unless `status` is success.
void check_launch(const char* kernel, cudaError_t status);

}  // namespace sgl_dsv4::api
