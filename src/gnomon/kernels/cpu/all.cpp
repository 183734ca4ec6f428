// One unit for everything that includes MLX: its headers take longer to compile than our code.
#include "attention.cpp"
#include "coded.cpp"
#include "block.cpp"
#include "fused.cpp"
#include "matmul.cpp"
#include "recurrent.cpp"
#include "rows.cpp"
#include "runtime.cpp"
