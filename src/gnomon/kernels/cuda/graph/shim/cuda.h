// The part of CUDA's driver interface that a decode step and MLX's own headers need, so that no toolkit must be installed. Values and layouts
// are those of cuda.h, which its vendor keeps: a function that changes gets a new name (_v2). The functions come from libcuda.so.1.
#pragma once
#include <cstddef>
#include <cstdint>

struct CUctx_st;
struct CUfunc_st;
struct CUgraphExec_st;
struct CUgraphNode_st;
struct CUgraph_st;
struct CUkern_st;
struct CUmod_st;
struct CUstream_st;
enum cudaError_enum : int { CUDA_SUCCESS = 0 };
using CUresult = cudaError_enum;
using CUcontext = CUctx_st*;
using CUfunction = CUfunc_st*;
using CUgraph = CUgraph_st*;
using CUgraphExec = CUgraphExec_st*;
using CUgraphNode = CUgraphNode_st*;
using CUkernel = CUkern_st*;
using CUmodule = CUmod_st*;
using CUstream = CUstream_st*;
using CUdeviceptr = unsigned long long;

struct CUDA_KERNEL_NODE_PARAMS_v2_st {
  CUfunction func;
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void** kernelParams;
  void** extra;
  CUkernel kern;
  CUcontext ctx;
};
using CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS_v2_st;

// A programmatic edge lets the second kernel start when all blocks of the first have said so or ended; it waits (griddepcontrol.wait) by itself.
struct CUgraphEdgeData {
  unsigned char from_port, to_port, type, reserved[5];
};
constexpr unsigned char CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1;
constexpr unsigned char CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
