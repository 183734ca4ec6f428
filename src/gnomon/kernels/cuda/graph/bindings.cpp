#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include "graph.h"

namespace nb = nanobind;
using namespace nb::literals;
using gnomon::Graph;
using gnomon::Launch;
using gnomon::Module;
using gnomon::Parameter;

namespace {
// Python holds C++'s own pointers: an evaluated array may let go of its graph on a thread without the interpreter.
struct ModuleHandle {
  std::shared_ptr<Module> module;
};
struct OrderHandle {
  std::shared_ptr<gnomon::Order> order = std::make_shared<gnomon::Order>();
};
struct GraphHandle {
  std::shared_ptr<Graph> graph;
};
template <Parameter::Kind KIND>
Parameter numbered(int index) {
  return Parameter{KIND, index};
}
}  // namespace

// Checks of shapes and types are in Python: these functions trust their arguments.
NB_MODULE(gnomon_cuda, m) {
  m.attr("built_for_mlx") = GNOMON_MLX_VERSION;
  m.def("architecture", &gnomon::architecture);
  nb::class_<ModuleHandle>(m, "Module").def("__init__", [](ModuleHandle* self, nb::bytes cubin, const std::string& name) {
    new (self) ModuleHandle{std::make_shared<Module>(std::string(cubin.c_str(), cubin.size()), name)};
  }, "cubin"_a, "name"_a);
  nb::class_<Parameter>(m, "Parameter");
  m.def("array", [](int index, int64_t offset) { return Parameter{Parameter::ARRAY, index, offset}; }, "index"_a, "offset"_a = 0);
  m.def("input", &numbered<Parameter::INPUT>, "index"_a);
  m.def("shape", &numbered<Parameter::SHAPE>, "index"_a);
  m.def("strides", &numbered<Parameter::STRIDES>, "index"_a);
  m.def("numbers", [] { return Parameter{Parameter::NUMBERS}; });
  m.def("output", [] { return Parameter{Parameter::OUTPUT}; });
  m.def("value", [](nb::bytes bytes) { return Parameter{Parameter::BYTES, 0, 0, std::string(bytes.c_str(), bytes.size())}; }, "bytes"_a);
  nb::class_<Launch>(m, "Launch").def("__init__", [](Launch* self, const ModuleHandle& module, const std::vector<unsigned>& grid, unsigned block, unsigned shared, bool early, std::vector<Parameter> parameters) {
    new (self) Launch{module.module, {grid.at(0), grid.at(1), grid.at(2)}, block, shared, early, std::move(parameters)};
  }, "module"_a, "grid"_a, "block"_a, "shared"_a, "early"_a, "parameters"_a);
  nb::class_<OrderHandle>(m, "Order").def(nb::init<>());
  nb::class_<GraphHandle>(m, "Graph")
      .def("__init__", [](GraphHandle* self, const OrderHandle& order, std::vector<Launch> launches, std::vector<mlx::core::array> arrays, const std::vector<std::pair<std::vector<int>, mlx::core::Dtype>>& inputs, const std::vector<int>& shape, mlx::core::Dtype type) {
        std::vector<std::pair<mlx::core::Shape, mlx::core::Dtype>> like;
        for (const auto& [s, t] : inputs) like.emplace_back(mlx::core::Shape(s.begin(), s.end()), t);
        new (self) GraphHandle{std::make_shared<Graph>(order.order, std::move(launches), std::move(arrays), std::move(like), mlx::core::Shape(shape.begin(), shape.end()), type)};
      }, "order"_a, "launches"_a, "arrays"_a, "inputs"_a, "shape"_a, "type"_a)
      .def_prop_ro("counts", [](const GraphHandle& self) { return self.graph->counts(); })
      .def("run", [](const GraphHandle& self, std::vector<mlx::core::array> inputs, std::vector<int> numbers, mlx::core::StreamOrDevice stream) {
        return gnomon::run(self.graph, std::move(inputs), std::move(numbers), stream);
      }, "inputs"_a, "numbers"_a, "stream"_a = nb::none());
}
