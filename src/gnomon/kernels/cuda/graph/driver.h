// Functions of the CUDA driver, found in the libcuda.so.1 that MLX has loaded.
#pragma once
#include "cuda.h"

namespace gnomon {

struct Driver {
  CUresult (*cuGetErrorName)(CUresult, const char**);
  CUresult (*cuGetErrorString)(CUresult, const char**);
  CUresult (*cuModuleLoadData)(CUmodule*, const void*);
  CUresult (*cuModuleUnload)(CUmodule);
  CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char*);
  CUresult (*cuFuncSetAttribute)(CUfunction, int, int);
  CUresult (*cuMemAllocAsync)(CUdeviceptr*, size_t, CUstream);
  CUresult (*cuMemFree_v2)(CUdeviceptr);
  CUresult (*cuGraphCreate)(CUgraph*, unsigned);
  CUresult (*cuGraphDestroy)(CUgraph);
  CUresult (*cuGraphAddKernelNode_v2)(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, const CUDA_KERNEL_NODE_PARAMS*);
  CUresult (*cuGraphAddDependencies_v2)(CUgraph, const CUgraphNode*, const CUgraphNode*, const CUgraphEdgeData*, size_t);
  CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec*, CUgraph, unsigned long long);
  CUresult (*cuGraphExecDestroy)(CUgraphExec);
  CUresult (*cuGraphExecKernelNodeSetParams_v2)(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS*);
  CUresult (*cuGraphUpload)(CUgraphExec, CUstream);
  CUresult (*cuGraphLaunch)(CUgraphExec, CUstream);
  CUresult (*cuStreamSynchronize)(CUstream);

  // Raises std::runtime_error naming the library or function that is missing.
  static const Driver& get();
};

// Raises std::runtime_error with the function's name and the driver's words for the error.
void check(CUresult result, const char* function);

}  // namespace gnomon

#define GNOMON_CALL(function, ...) ::gnomon::check(::gnomon::Driver::get().function(__VA_ARGS__), #function)
