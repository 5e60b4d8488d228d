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

// Programmatic dependent launch (PDL): a kernel that is launched with that attribute starts while the previous one
// runs, and waits here for its results.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel of the stream may start.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace lngen

#endif
