#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include "matmul.h"

namespace nb = nanobind;
using namespace nb::literals;

// Checks of shapes and types are in Python, next to each operation's contract: these functions trust their arguments.
NB_MODULE(gnomon_kernels, m) {
  m.attr("built_for_mlx") = GNOMON_MLX_VERSION;
  m.def("isa", &gnomon::isa);
  m.def("isas", &gnomon::isas);
  m.def("set_isa", &gnomon::set_isa, "name"_a);
  m.def("threads", &gnomon::threads);
  m.def("set_threads", &gnomon::set_threads, "n"_a);
  m.def("set_spin", &gnomon::set_spin, "microseconds"_a);
  m.def("quantized_matmul", &gnomon::quantized_matmul, "x"_a, "w"_a, "scales"_a, "biases"_a, "group"_a, "bits"_a, "stream"_a = nb::none());
  m.def("gather_qmm", &gnomon::gather_qmm, "x"_a, "w"_a, "scales"_a, "biases"_a, "lhs"_a.none(), "rhs"_a, "group"_a, "bits"_a, "stream"_a = nb::none());
  m.def("quantized_embedding", &gnomon::quantized_embedding, "ids"_a, "w"_a, "scales"_a, "biases"_a, "group"_a, "bits"_a, "stream"_a = nb::none());
  m.def("dense_matmul", &gnomon::dense_matmul, "x"_a, "w"_a, "stream"_a = nb::none());
}
