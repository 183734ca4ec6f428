// MLX's headers format messages with a library whose headers its wheel leaves out; no such message is made here.
#pragma once
#include <string>

namespace fmt {
template <typename... A>
std::string format(A&&...) {
  return {};
}
}  // namespace fmt
