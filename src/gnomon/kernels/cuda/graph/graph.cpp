#include "graph.h"
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include "mlx/backend/cuda/device.h"
#include "mlx/backend/cuda/utils.h"
#include "mlx/primitives.h"

namespace gnomon {
namespace {

constexpr int MOST_NUMBERS = 32;
constexpr int MOST_AXES = 8;
constexpr int SLOTTED = 4, SLOTS = 2, LEAST_SLOTS = 512;

const mx::cu::CudaBuffer& buffer_of(const mx::array& a) { return *static_cast<const mx::cu::CudaBuffer*>(a.buffer().ptr()); }
const char* data_of(const mx::array& a) { return static_cast<const char*>(buffer_of(a).data) + a.offset(); }

size_t size_of(const Parameter& p) {
  switch (p.kind) {
    case Parameter::SHAPE: return MOST_AXES * sizeof(int);
    case Parameter::STRIDES: return MOST_AXES * sizeof(int64_t);
    case Parameter::NUMBERS: return MOST_NUMBERS * sizeof(int);
    case Parameter::BYTES: return p.bytes.size();
    default: return sizeof(void*);
  }
}

}  // namespace

std::string architecture() {
  Driver::get();
  const auto& device = mx::cu::device(mx::Device(mx::Device::gpu));
  const int major = device.compute_capability_major();
  return "sm_" + std::to_string(major * 10 + device.compute_capability_minor()) + (major >= 9 ? "a" : "");
}

Module::Module(const std::string& cubin, const std::string& name) {
  mx::cu::device(mx::Device(mx::Device::gpu)).make_current();
  GNOMON_CALL(cuModuleLoadData, &module_, cubin.data());
  GNOMON_CALL(cuModuleGetFunction, &function_, module_, name.c_str());
}
Module::~Module() {
  if (module_) Driver::get().cuModuleUnload(module_);
}

// Memory of outputs. It goes back here when MLX lets go of the array, and on to a later step of the same stream, which runs behind all readers.
class OutputPool : public std::enable_shared_from_this<OutputPool> {
 public:
  explicit OutputPool(size_t size) : size_(size) {}
  ~OutputPool() {
    if (free_.empty()) return;
    mx::cu::device(mx::Device(mx::Device::gpu)).make_current();  // the thread may be MLX's own
    for (void* p : free_) Driver::get().cuMemFree_v2(reinterpret_cast<CUdeviceptr>(p));
  }
  mx::allocator::Data take(int device, CUstream stream) {
    void* data = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) data = free_.back(), free_.pop_back();
    }
    if (!data) {
      CUdeviceptr made = 0;
      GNOMON_CALL(cuMemAllocAsync, &made, size_, stream);
      data = reinterpret_cast<void*>(made);
    }
    return mx::allocator::Data(mx::allocator::Buffer(new mx::cu::CudaBuffer{data, size_, device}), [pool = shared_from_this()](mx::allocator::Buffer b) { pool->give(b); });
  }

 private:
  void give(mx::allocator::Buffer b) {
    auto* buffer = static_cast<mx::cu::CudaBuffer*>(b.ptr());
    if (buffer->device < 0) {  // read by the host: MLX has freed the memory and put the values into its own
      Driver::get().cuMemFree_v2(reinterpret_cast<CUdeviceptr>(buffer->data));
    } else {
      std::lock_guard lock(mutex_);
      free_.push_back(buffer->data);
    }
    delete buffer;
  }

  const size_t size_;
  std::mutex mutex_;
  std::vector<void*> free_;
};

Graph::Graph(std::shared_ptr<Order> order, std::vector<Launch> launches, std::vector<mx::array> arrays, std::vector<std::pair<mx::Shape, mx::Dtype>> inputs, mx::Shape shape, mx::Dtype type)
    : order_(std::move(order)), launches_(std::move(launches)), arrays_(std::move(arrays)), inputs_(std::move(inputs)), shape_(std::move(shape)), type_(type), at_(arrays_.size()), in_(inputs_.size()) {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const auto& a = arrays_[i];
    if (!a.is_available() || !a.flags().row_contiguous) throw std::invalid_argument("arrays that a graph holds must be evaluated and contiguous");
    at_[i].buffer = &buffer_of(a), at_[i].offset = a.offset();
  }
  for (size_t i = 0; i < launches_.size(); ++i) {
    Node node;
    size_t size = 0;
    std::vector<size_t> begins;
    for (const auto& p : launches_[i].parameters) {
      size = (size + 15) / 16 * 16;
      begins.push_back(size);
      size += size_of(p);
      if (p.kind == Parameter::ARRAY) at_.at(p.index).users.push_back(i);
      if (p.kind == Parameter::INPUT || p.kind == Parameter::SHAPE || p.kind == Parameter::STRIDES) in_.at(p.index).users.push_back(i);
      if (p.kind == Parameter::OUTPUT) out_.users.push_back(i);
      if (p.kind == Parameter::NUMBERS) counted_.push_back(i);
    }
    node.room.resize(size);
    for (size_t begin : begins) node.values.push_back(node.room.data() + begin);
    nodes_.push_back(std::move(node));  // moves the room, whose data stay where they are
  }
  size_t elements = 1;
  for (int n : shape_) elements *= n;
  pool_ = std::make_shared<OutputPool>(elements * mx::size_of(type_));
  mx::cu::device(mx::Device(mx::Device::gpu)).make_current();
  build();
}

Graph::~Graph() {
  if (exec_) Driver::get().cuGraphExecDestroy(exec_);
  if (graph_) Driver::get().cuGraphDestroy(graph_);
}

bool Graph::takes(const std::vector<mx::array>& inputs) const {
  return std::equal(inputs.begin(), inputs.end(), inputs_.begin(), inputs_.end(), [](const mx::array& a, const auto& like) {
    const auto& [shape, type] = like;
    if (a.dtype() != type || a.ndim() != shape.size()) return false;
    for (int i = 0; i < int(a.ndim()); ++i) {
      const int n = a.shape(i), most = shape[i];
      const bool fits = int(a.ndim()) == SLOTTED && i == SLOTS ? n <= most && (most <= LEAST_SLOTS || n > most / 2) : n == most;
      if (!fits) return false;
    }
    return true;
  });
}

void Graph::changed(Place& place) {
  for (int user : place.users) nodes_[user].changed = true;
}

void Graph::fill(int i, const std::vector<mx::array>& inputs, const std::vector<int>& numbers) {
  auto& values = nodes_[i].values;
  const auto& parameters = launches_[i].parameters;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto& one = parameters[p];
    const void* pointer = nullptr;
    switch (one.kind) {
      case Parameter::BYTES: std::memcpy(values[p], one.bytes.data(), one.bytes.size()); continue;
      case Parameter::NUMBERS: std::memcpy(values[p], numbers.data(), numbers.size() * sizeof(int)); continue;
      case Parameter::SHAPE: {
        const auto& shape = inputs[one.index].shape();
        int whole[MOST_AXES] = {};
        std::copy(shape.begin(), shape.end(), whole);
        std::memcpy(values[p], whole, sizeof(whole));
        continue;
      }
      case Parameter::STRIDES: {
        const auto& strides = inputs[one.index].strides();
        int64_t wide[MOST_AXES] = {};
        std::copy(strides.begin(), strides.end(), wide);
        std::memcpy(values[p], wide, sizeof(wide));
        continue;
      }
      case Parameter::ARRAY: pointer = static_cast<const char*>(at_[one.index].data) + one.offset; break;
      case Parameter::INPUT: pointer = in_[one.index].data; break;
      case Parameter::OUTPUT: pointer = out_.data; break;
    }
    std::memcpy(values[p], &pointer, sizeof(pointer));
  }
}

CUDA_KERNEL_NODE_PARAMS Graph::parameters(int i) {
  const auto& l = launches_[i];
  CUDA_KERNEL_NODE_PARAMS made{};
  made.func = l.module->function();
  made.gridDimX = l.grid[0], made.gridDimY = l.grid[1], made.gridDimZ = l.grid[2];
  made.blockDimX = l.block, made.blockDimY = made.blockDimZ = 1;
  made.sharedMemBytes = l.shared;
  made.kernelParams = nodes_[i].values.data();
  return made;
}

void Graph::build() {
  GNOMON_CALL(cuGraphCreate, &graph_, 0);
  for (size_t i = 0; i < launches_.size(); ++i) {
    if (launches_[i].shared > 48 * 1024)
      GNOMON_CALL(cuFuncSetAttribute, launches_[i].module->function(), CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launches_[i].shared);
    const auto made = parameters(i);
    GNOMON_CALL(cuGraphAddKernelNode_v2, &nodes_[i].node, graph_, nullptr, 0, &made);
    if (!i) continue;
    CUgraphEdgeData edge{};
    if (launches_[i].early) edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    GNOMON_CALL(cuGraphAddDependencies_v2, graph_, &nodes_[i - 1].node, &nodes_[i].node, &edge, 1);
  }
  GNOMON_CALL(cuGraphInstantiateWithFlags, &exec_, graph_, 0);
}

void Graph::run(mx::Stream stream, const std::vector<mx::array>& inputs, const std::vector<int>& numbers, mx::array& out) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  encoder.commit();
  const CUstream on = encoder.stream();
  std::lock_guard lock(order_->mutex);
  if (order_->last && order_->last != on) GNOMON_CALL(cuStreamSynchronize, order_->last);
  order_->last = on;
  out.set_data(pool_->take(encoder.device().cuda_device(), on));
  for (auto& at : at_) {
    const void* data = static_cast<const char*>(at.buffer->data) + at.offset;
    if (at.data != data) at.data = data, changed(at);
  }
  for (size_t i = 0; i < in_.size(); ++i) {
    const void* data = data_of(inputs[i]);
    const int slots = inputs[i].ndim() == SLOTTED ? inputs[i].shape(SLOTS) : 0;
    if (in_[i].data == data && in_[i].slots == slots && in_[i].strides == inputs[i].strides()) continue;
    in_[i].data = data, in_[i].slots = slots, in_[i].strides = inputs[i].strides();
    changed(in_[i]);
  }
  if (out_.data != data_of(out)) out_.data = data_of(out), changed(out_);
  for (int i : counted_) nodes_[i].changed = true;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!nodes_[i].changed) continue;
    fill(i, inputs, numbers);
    const auto made = parameters(i);
    GNOMON_CALL(cuGraphExecKernelNodeSetParams_v2, exec_, nodes_[i].node, &made);
    nodes_[i].changed = false;
    ++set_;
  }
  GNOMON_CALL(cuGraphLaunch, exec_, on);
  ++steps_;
}

std::pair<int64_t, int64_t> Graph::counts() {
  std::lock_guard lock(order_->mutex);
  return {set_, steps_};
}

namespace {
class Step : public mx::Primitive {
 public:
  Step(mx::Stream s, std::shared_ptr<Graph> graph, std::vector<int> numbers) : Primitive(s), graph_(std::move(graph)), numbers_(std::move(numbers)) {}
  const char* name() const override { return "GnomonStep"; }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonStep runs on CUDA only"); }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override { graph_->run(stream(), inputs, numbers_, outputs[0]); }

 private:
  std::shared_ptr<Graph> graph_;
  std::vector<int> numbers_;
};
}  // namespace

std::optional<mx::array> run(std::shared_ptr<Graph> graph, std::vector<mx::array> inputs, std::vector<int> numbers, mx::StreamOrDevice stream) {
  if (!graph->takes(inputs)) return std::nullopt;
  if (numbers.size() > MOST_NUMBERS) throw std::invalid_argument("a graph takes up to 32 numbers, got " + std::to_string(numbers.size()));
  const auto shape = graph->shape();
  const auto type = graph->type();
  return mx::array(shape, type, std::make_shared<Step>(mx::to_stream(stream), std::move(graph), std::move(numbers)), std::move(inputs));
}

}  // namespace gnomon
