// launch.cuh: programmatic dependent launch (PDL): kernels of one stream that overlap.
//
//     pdl_wait();     // the results of the previous kernel are there
//     pdl_trigger();  // the next kernel may start
//
// PTX griddepcontrol; cudaGridDependencySynchronize() and cudaTriggerProgrammaticLaunchCompletion() of the CUDA
// runtime. Without the launch attribute, and before sm_90, both do nothing.
#ifndef LNGEN_LAUNCH_CUH
#define LNGEN_LAUNCH_CUH

namespace lngen {

// Waits until the previous kernel of the stream has ended and its stores are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel of the stream may start once every block has come here or ended.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace lngen

#endif
