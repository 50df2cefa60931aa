// PTX instructions, each wrapped once and named like the instruction.
#pragma once

#include <cstdint>

namespace sgl_dsv4::ptx {

// PTX ISA, "griddepcontrol": blocks until every grid this one depends on has finished and its writes are visible.
// A no-op in a grid that was launched without the programmatic attribute. Code below sm_90 has no such wait, and the
// host must not set the attribute for it (see launch.h).
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid start its prologue. Says nothing about this grid's results: the next grid's wait covers those.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sgl_dsv4::ptx
