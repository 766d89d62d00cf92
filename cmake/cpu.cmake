# What the CPU backend is compiled for, asked of the compiler itself.

# The macros that the compiler predefines under the given options; empty where it cannot tell (MSVC).
function(pyllamacache_cpu_macros result)
    set(empty "${CMAKE_BINARY_DIR}/empty.c")
    file(TOUCH "${empty}")
    execute_process(
        COMMAND ${CMAKE_C_COMPILER} ${ARGN} -dM -E "${empty}"
        OUTPUT_VARIABLE macros
        ERROR_QUIET
    )
    set(${result} "${macros}" PARENT_SCOPE)
endfunction()

# The features that a machine must have to run a target, comma-separated, in the names that Linux reports.
function(pyllamacache_cpu_features result target)
    set(features "")
    get_target_property(options ${target} COMPILE_OPTIONS)
    list(FILTER options INCLUDE REGEX "^-m")
    pyllamacache_cpu_macros(macros ${options})
    foreach(pair
            SSE3=pni SSSE3=ssse3 SSE4_1=sse4_1 SSE4_2=sse4_2 POPCNT=popcnt AVX=avx AVX2=avx2 FMA=fma F16C=f16c
            BMI=bmi1 BMI2=bmi2 LZCNT=abm MOVBE=movbe ADX=adx GFNI=gfni VAES=vaes VPCLMULQDQ=vpclmulqdq
            AVX512F=avx512f AVX512CD=avx512cd AVX512BW=avx512bw AVX512DQ=avx512dq AVX512VL=avx512vl
            AVX512IFMA=avx512ifma AVX512VBMI=avx512vbmi AVX512VBMI2=avx512_vbmi2 AVX512VNNI=avx512_vnni
            AVX512BITALG=avx512_bitalg AVX512VPOPCNTDQ=avx512_vpopcntdq AVX512BF16=avx512_bf16
            AVX512FP16=avx512_fp16 AVXVNNI=avx_vnni
            AMX_TILE=amx_tile AMX_INT8=amx_int8 AMX_BF16=amx_bf16
            ARM_FEATURE_DOTPROD=asimddp ARM_FEATURE_FP16_VECTOR_ARITHMETIC=asimdhp ARM_FEATURE_MATMUL_INT8=i8mm
            ARM_FEATURE_SVE=sve ARM_FEATURE_SVE2=sve2)
        string(REPLACE "=" ";" pair "${pair}")
        list(GET pair 0 macro)
        list(GET pair 1 feature)
        if(macros MATCHES "#define __${macro}(__)? ")
            list(APPEND features ${feature})
        endif()
    endforeach()
    list(JOIN features "," features)
    set(${result} "${features}" PARENT_SCOPE)
endfunction()
