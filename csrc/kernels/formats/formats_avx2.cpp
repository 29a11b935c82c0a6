#define KVCORE_ISA_NS avx2
#include "kernels/dispatch/levels.h"
#include "kernels/simd/avx2.h"
//
#include "kernels/simd/int_avx2.h"
//
#include "kernels/simd/elements.h"
//
#include "kernels/formats/formats_impl.h"

namespace kvcore::kernels::avx2 {

bool encode_block_entry(const EncodeBlock& block) { return encode_block(block); }
void decode_block_entry(const DecodeBlock& block) { decode_block(block); }

}  // namespace kvcore::kernels::avx2
