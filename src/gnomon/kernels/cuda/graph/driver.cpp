#include "driver.h"
#include <dlfcn.h>
#include <stdexcept>
#include <string>

namespace gnomon {
namespace {

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("libcuda.so.1 can't be loaded: no NVIDIA driver here");
  Driver d{};
  const auto find = [&](auto& function, const char* name) {
    void* found = dlsym(library, name);
    if (!found) throw std::runtime_error(std::string("the NVIDIA driver is too old: it has no ") + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
#define GNOMON_FIND(name) find(d.name, #name)
  GNOMON_FIND(cuGetErrorName);
  GNOMON_FIND(cuGetErrorString);
  GNOMON_FIND(cuModuleLoadData);
  GNOMON_FIND(cuModuleUnload);
  GNOMON_FIND(cuModuleGetFunction);
  GNOMON_FIND(cuFuncSetAttribute);
  GNOMON_FIND(cuMemAllocAsync);
  GNOMON_FIND(cuMemFree_v2);
  GNOMON_FIND(cuGraphCreate);
  GNOMON_FIND(cuGraphDestroy);
  GNOMON_FIND(cuGraphAddKernelNode_v2);
  GNOMON_FIND(cuGraphAddDependencies_v2);
  GNOMON_FIND(cuGraphInstantiateWithFlags);
  GNOMON_FIND(cuGraphExecDestroy);
  GNOMON_FIND(cuGraphExecKernelNodeSetParams_v2);
  GNOMON_FIND(cuGraphUpload);
  GNOMON_FIND(cuGraphLaunch);
  GNOMON_FIND(cuStreamSynchronize);
#undef GNOMON_FIND
  return d;
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver = load();
  return driver;
}

void check(CUresult result, const char* function) {
  if (result == CUDA_SUCCESS) return;
  const char *name = nullptr, *words = nullptr;
  Driver::get().cuGetErrorName(result, &name);
  Driver::get().cuGetErrorString(result, &words);
  throw std::runtime_error(std::string(function) + " failed: " + (name ? name : std::to_string(int(result)).c_str()) + (words ? std::string(", ") + words : ""));
}

}  // namespace gnomon
