#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include "attention.h"
#include "coded.h"
#include "experts.h"
#include "block.h"
#include "fused.h"
#include "matmul.h"
#include "recurrent.h"
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
  m.def("set_profile", &gnomon::set_profile, "on"_a);
  m.def("set_spin", &gnomon::set_spin, "microseconds"_a);
  m.def("quantized_matmul", &gnomon::quantized_matmul, "x"_a, "w"_a, "scales"_a, "biases"_a, "group"_a, "bits"_a, "integer"_a = false, "tiled"_a = false, "stream"_a = nb::none());
  m.def("gather_qmm", &gnomon::gather_qmm, "x"_a, "w"_a, "scales"_a, "biases"_a, "lhs"_a.none(), "rhs"_a, "group"_a, "bits"_a, "integer"_a = false, "tiled"_a = false, "stream"_a = nb::none());
  m.def("gather_mm", &gnomon::gather_mm, "x"_a, "b"_a, "lhs"_a.none(), "rhs"_a, "stream"_a = nb::none());
  m.def("dequantise", &gnomon::dequantise, "w"_a, "scales"_a, "biases"_a, "group"_a, "bits"_a, "stream"_a = nb::none());
  m.def("quantized_embedding", &gnomon::quantized_embedding, "ids"_a, "w"_a, "scales"_a, "biases"_a, "group"_a, "bits"_a, "tiled"_a = false, "stream"_a = nb::none());
  m.def("tiled", &gnomon::tiled, "w"_a, "stream"_a = nb::none());
  m.def("dense_matmul", &gnomon::dense_matmul, "x"_a, "w"_a, "stream"_a = nb::none());
  m.def("rms_norm", &gnomon::rms_norm, "x"_a, "weight"_a.none(), "eps"_a, "stream"_a = nb::none());
  m.def("layer_norm", &gnomon::layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, "stream"_a = nb::none());
  m.def("gated", &gnomon::gated, "gate"_a, "up"_a, "activation"_a, "stream"_a = nb::none());
  m.def("softmax", &gnomon::softmax, "x"_a, "stream"_a = nb::none());
  m.def("logsumexp", &gnomon::logsumexp, "x"_a, "keepdims"_a, "stream"_a = nb::none());
  m.def("argmax", &gnomon::argmax, "x"_a, "keepdims"_a, "stream"_a = nb::none());
  m.def("rope", &gnomon::rope, "x"_a, "dims"_a, "traditional"_a, "base"_a.none(), "scale"_a, "offset"_a, "freqs"_a.none(), "stream"_a = nb::none());
  m.def("attention", &gnomon::attention, "q"_a, "k"_a, "v"_a, "scale"_a, "kind"_a, "mask"_a.none(), "starts"_a.none(), "window"_a, "sinks"_a.none(), "order"_a.none() = nb::none(), "stream"_a = nb::none());

  m.def("gated_delta", &gnomon::gated_delta, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a, "mask"_a.none(), "stream"_a = nb::none());
  m.def("short_convolution", &gnomon::short_convolution, "x"_a, "w"_a, "silu"_a, "stream"_a = nb::none());

  using gnomon::HeadForm;
  using gnomon::Projection;
  // A process may load builds for different instruction sets: the first one's types serve them all, as a type is registered once.
  if (nb::handle known = nb::type<Projection>(); known.is_valid()) m.attr("Projection") = known;
  else nb::class_<Projection>(m, "Projection")
      .def("__init__",
           [](Projection* self, const mlx::core::array& w, std::optional<mlx::core::array> scales, std::optional<mlx::core::array> biases, std::optional<mlx::core::array> bias, int group,
              int bits, bool integer, bool tiled) { new (self) Projection(w, std::move(scales), std::move(biases), std::move(bias), group, bits, integer, tiled); },
           "w"_a, "scales"_a.none(), "biases"_a.none(), "bias"_a.none(), "group"_a, "bits"_a, "integer"_a = false, "tiled"_a = false);
  if (nb::handle known = nb::type<HeadForm>(); known.is_valid()) m.attr("HeadForm") = known;
  else nb::class_<HeadForm>(m, "HeadForm")
      .def("__init__",
           [](HeadForm* self, int q_heads, int k_heads, float norm_eps, int rope_dims, bool traditional, float base, float scale, bool gated) {
             new (self) HeadForm{q_heads, k_heads, norm_eps, rope_dims, traditional, base, scale, gated};
           },
           "q_heads"_a, "k_heads"_a, "norm_eps"_a, "rope_dims"_a, "traditional"_a, "base"_a, "scale"_a, "gated"_a = false);
  using gnomon::CodesForm;
  if (nb::handle known = nb::type<CodesForm>(); known.is_valid()) m.attr("CodesForm") = known;
  else nb::class_<CodesForm>(m, "CodesForm")
      .def(nb::init<int, int, int, int, int, std::vector<float>, std::vector<float>, std::vector<float>>(), "coding"_a, "bits"_a, "group"_a, "dim"_a, "type"_a, "levels"_a, "bounds"_a, "signs"_a)
      .def_prop_ro("row_bytes", &CodesForm::row_bytes);
  m.def("coded_attention", &gnomon::coded_attention, "q"_a, "k"_a, "v"_a, "key_form"_a, "value_form"_a, "keys"_a, "scale"_a, "kind"_a, "mask"_a.none(), "starts"_a.none(), "window"_a,
        "sinks"_a.none(), "order"_a.none() = nb::none(), "stream"_a = nb::none());
  m.def("encode", &gnomon::encode, "x"_a, "form"_a, "stream"_a = nb::none());
  m.def("coded_append", &gnomon::coded_append, "k"_a, "v"_a, "key_form"_a, "value_form"_a, "starts"_a, "keys"_a, "values"_a, "stream"_a = nb::none());
  if (nb::handle known = nb::type<gnomon::Blocks>(); known.is_valid()) m.attr("Blocks") = known;
  else nb::class_<gnomon::Blocks>(m, "Blocks")
      .def(nb::init<>())
      .def("add", &gnomon::Blocks::add, "norm"_a.none(), "eps"_a, "q"_a, "k"_a, "v"_a, "o"_a, "q_norm"_a.none(), "k_norm"_a.none(), "form"_a, "freqs"_a.none(), "scale"_a, "after"_a.none(),
           "after_eps"_a, "mlp_norm"_a.none(), "mlp_eps"_a, "gate"_a, "up"_a, "down"_a, "activation"_a, "mlp_after"_a.none(), "mlp_after_eps"_a);
  if (nb::handle known = nb::type<gnomon::Pages>(); known.is_valid()) m.attr("Pages") = known;
  else nb::class_<gnomon::Pages>(m, "Pages")
      .def(nb::init<int, std::vector<std::vector<int>>, std::vector<int>, const std::vector<std::array<int, 4>>&>(), "size"_a, "rows"_a, "counts"_a, "fresh"_a);
  m.def("run_blocks", &gnomon::run_blocks, "blocks"_a, "x"_a, "starts"_a, "buffers"_a, "before"_a.none(), "homes"_a = std::vector<int>{},
        "rings"_a = std::vector<std::vector<int>>{}, "codes"_a = std::vector<std::optional<gnomon::CodesPair>>{}, "pages"_a.none() = nb::none(), "stream"_a = nb::none());
  m.def("delta_mixer", &gnomon::delta_mixer, "x"_a, "qkv"_a, "z"_a, "b"_a, "a"_a, "conv"_a, "a_log"_a, "dt_bias"_a, "norm"_a, "k_heads"_a, "v_heads"_a, "norm_eps"_a, "before"_a.none(),
        "state"_a.none(), "counts"_a.none(), "stream"_a = nb::none());
  m.def("heads", &gnomon::heads, "x"_a, "norm"_a.none(), "eps"_a, "q"_a, "k"_a, "v"_a, "q_norm"_a.none(), "k_norm"_a.none(), "form"_a, "offset"_a.none(), "freqs"_a.none(),
        "stream"_a = nb::none());
  m.def("attention_layer", &gnomon::attention_layer, "x"_a, "norm"_a.none(), "eps"_a, "q"_a, "k"_a, "v"_a, "o"_a, "q_norm"_a.none(), "k_norm"_a.none(), "form"_a, "offset"_a, "freqs"_a.none(),
        "scale"_a, "keys"_a, "values"_a, "after"_a.none(), "after_eps"_a, "residual"_a.none(), "ring"_a = std::vector<int>{}, "stream"_a = nb::none());
  m.def("experts", &gnomon::experts, "x"_a, "norm"_a.none(), "eps"_a, "router"_a, "gate"_a, "up"_a, "down"_a, "chosen"_a, "normalised"_a, "activation"_a, "residual"_a, "stream"_a = nb::none());
  m.def("project", &gnomon::project, "x"_a, "p"_a, "norm"_a.none(), "eps"_a, "residual"_a.none(), "stream"_a = nb::none());
  m.def("gated_mlp", &gnomon::gated_mlp, "x"_a, "before"_a.none(), "before_eps"_a, "gate"_a, "up"_a, "down"_a, "activation"_a, "after"_a.none(), "after_eps"_a, "residual"_a,
        "stream"_a = nb::none());
}
