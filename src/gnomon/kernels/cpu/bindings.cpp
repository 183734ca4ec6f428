#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include "attention.h"
#include "matmul.h"
#include "rows.h"

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
  m.def("rms_norm", &gnomon::rms_norm, "x"_a, "weight"_a.none(), "eps"_a, "stream"_a = nb::none());
  m.def("layer_norm", &gnomon::layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, "stream"_a = nb::none());
  m.def("gated", &gnomon::gated, "gate"_a, "up"_a, "activation"_a, "stream"_a = nb::none());
  m.def("softmax", &gnomon::softmax, "x"_a, "stream"_a = nb::none());
  m.def("logsumexp", &gnomon::logsumexp, "x"_a, "keepdims"_a, "stream"_a = nb::none());
  m.def("argmax", &gnomon::argmax, "x"_a, "keepdims"_a, "stream"_a = nb::none());
  m.def("rope", &gnomon::rope, "x"_a, "dims"_a, "traditional"_a, "base"_a.none(), "scale"_a, "offset"_a, "freqs"_a.none(), "stream"_a = nb::none());
  m.def("attention", &gnomon::attention, "q"_a, "k"_a, "v"_a, "scale"_a, "kind"_a, "mask"_a.none(), "starts"_a.none(), "window"_a, "sinks"_a.none(), "stream"_a = nb::none());
}
