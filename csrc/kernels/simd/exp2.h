// Coefficients of 2^f = 1 + f (c1 + f (c2 + ...)) on [-0.5, 0.5]: least maximum relative error at
// degree 5 with the constant term held at 1, so that 2^0 is exactly 1 (error 9.2e-8).
#pragma once

#define KVCORE_EXP2_C1 0.6931470036506653f
#define KVCORE_EXP2_C2 0.24022242426872253f
#define KVCORE_EXP2_C3 0.05550733953714371f
#define KVCORE_EXP2_C4 0.00967151764780283f
#define KVCORE_EXP2_C5 0.0013264707522466779f
