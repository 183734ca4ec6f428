// What MLX's headers name of CUDA's runtime. Nothing of it is called here.
#pragma once
#include "cuda.h"

enum cudaError : int { cudaSuccess = 0 };
using cudaError_t = cudaError;
using cudaStream_t = CUstream;
using cudaGraph_t = CUgraph;
using cudaGraphExec_t = CUgraphExec;
using cudaGraphNode_t = CUgraphNode;
using cudaMemPool_t = struct CUmemPoolHandle_st*;
struct cudaKernelNodeParams;
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern "C" {
cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaStreamDestroy(cudaStream_t);
}
template <typename F>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int*, int*, F*);
