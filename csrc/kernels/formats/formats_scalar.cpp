#define KVCORE_ISA_NS scalar
#include "kernels/dispatch/levels.h"
#include "kernels/simd/scalar.h"
//
#include "kernels/simd/int_scalar.h"
//
#include "kernels/simd/elements.h"
//
#include "kernels/formats/formats_impl.h"

namespace kvcore::kernels::scalar {

bool encode_block_entry(const EncodeBlock& block) { return encode_block(block); }
void decode_block_entry(const DecodeBlock& block) { decode_block(block); }

}  // namespace kvcore::kernels::scalar
