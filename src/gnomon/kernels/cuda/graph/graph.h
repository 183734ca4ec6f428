// A chain of kernels as one CUDA graph, launched by one MLX primitive.
//
// The graph holds raw pointers. Whenever it is launched they are compared with where the arrays are now, and the nodes whose pointers changed
// are set anew: that is for inputs and the output of every step, for buffers that have grown, and for weights that MLX has moved to the host.
#pragma once
#include <mutex>
#include <optional>
#include <string>
#include <vector>
#include "driver.h"
#include "mlx/array.h"
#include "mlx/backend/cuda/allocator.h"
#include "mlx/utils.h"

namespace gnomon {
namespace mx = mlx::core;

// What the default GPU runs machine code for, "sm_90a". Raises std::runtime_error if there is no driver.
std::string architecture();

// One kernel of a cubin.
class Module {
 public:
  Module(const std::string& cubin, const std::string& name);
  ~Module();
  Module(const Module&) = delete;
  CUfunction function() const { return function_; }

 private:
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

// What a kernel's parameter is.
struct Parameter {
  enum Kind { ARRAY, INPUT, SHAPE, STRIDES, NUMBERS, OUTPUT, BYTES } kind;
  int index = 0;       // of an array that stays, or of an input of the step
  int64_t offset = 0;  // in bytes, into an array that stays
  std::string bytes = {};
};

struct Launch {
  std::shared_ptr<Module> module;
  unsigned grid[3], block, shared;
  bool early;  // it may be started before the kernel in front has ended: it waits for that by itself
  std::vector<Parameter> parameters;
};

// Graphs that share memory: they run one after the other, whatever their streams.
struct Order {
  std::mutex mutex;
  CUstream last = nullptr;
};

class OutputPool;

class Graph {
 public:
  // `arrays` stay: they must be evaluated and contiguous. Steps take inputs of these shapes and types (of four axes, with up to so many slots on
  // the third and more than half of them, or up to 512) and up to 32 numbers. Outputs are [shape] of `type`. Raises std::runtime_error naming what the driver refuses.
  Graph(std::shared_ptr<Order> order, std::vector<Launch> launches, std::vector<mx::array> arrays, std::vector<std::pair<mx::Shape, mx::Dtype>> inputs, mx::Shape shape, mx::Dtype type);
  ~Graph();
  Graph(const Graph&) = delete;

  const mx::Shape& shape() const { return shape_; }
  mx::Dtype type() const { return type_; }
  // Whether inputs have the shapes and types that the chain was made for.
  bool takes(const std::vector<mx::array>& inputs) const;
  // Launches the chain on the encoder's stream, behind all that the encoder holds.
  void run(mx::Stream stream, const std::vector<mx::array>& inputs, const std::vector<int>& numbers, mx::array& out);
  // How often nodes were set anew, and steps launched.
  std::pair<int64_t, int64_t> counts();

 private:
  struct Node {
    CUgraphNode node = nullptr;
    std::vector<char> room;  // the parameters' values
    std::vector<void*> values;
    bool changed = true;
  };
  struct Place {  // where an array was at the last launch, and who asked
    const void* data = nullptr;
    mx::Strides strides;
    int slots = 0;
    std::vector<int> users;
    const mx::cu::CudaBuffer* buffer = nullptr;  // of an array that stays
    int64_t offset = 0;
  };

  void changed(Place& place);
  void build();
  CUDA_KERNEL_NODE_PARAMS parameters(int i);
  void fill(int i, const std::vector<mx::array>& inputs, const std::vector<int>& numbers);

  std::shared_ptr<Order> order_;
  std::vector<Launch> launches_;
  std::vector<mx::array> arrays_;
  std::vector<std::pair<mx::Shape, mx::Dtype>> inputs_;
  mx::Shape shape_;
  mx::Dtype type_;
  std::vector<Node> nodes_;
  std::vector<Place> at_, in_;
  Place out_;
  std::vector<int> counted_;  // launches with NUMBERS
  std::shared_ptr<OutputPool> pool_;
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
  int64_t set_ = 0, steps_ = 0;
};

// [shape] of the graph's output, lazily; nothing if the inputs have other shapes than the graph's.
std::optional<mx::array> run(std::shared_ptr<Graph> graph, std::vector<mx::array> inputs, std::vector<int> numbers, mx::StreamOrDevice stream);

}  // namespace gnomon
