/* What an extension built with -fsanitize-coverage=trace-pc,trace-cmp has reached, for fuzz_guided.py.
 *
 * raypipe_edges has a counter for each way from one block of code to the next, by a hash of their places, and
 * raypipe_operands the last numbers that were compared: lengths, tags and checksums that an input would need.
 */
#include <stdint.h>

#define NUM_EDGES 65536
#define NUM_OPERANDS 256

uint8_t raypipe_edges[NUM_EDGES];
uint64_t raypipe_operands[NUM_OPERANDS];
static unsigned num_operands;
static __thread uintptr_t before;

void __sanitizer_cov_trace_pc(void)
{
    const uint64_t here = (uint64_t)(uintptr_t)__builtin_return_address(0) * 0x9E3779B97F4A7C15u;
    uint8_t *edge = &raypipe_edges[(here ^ before) >> 48];
    *edge += *edge < 255;
    before = here >> 1;
}

static void note(uint64_t one, uint64_t other)
{
    if (one == other || one < 2)
        return;
    raypipe_operands[num_operands++ % NUM_OPERANDS] = one;
}

void __sanitizer_cov_trace_cmp1(uint8_t one, uint8_t other) { (void)one, (void)other; }
void __sanitizer_cov_trace_cmp2(uint16_t one, uint16_t other) { note(one, other); }
void __sanitizer_cov_trace_cmp4(uint32_t one, uint32_t other) { note(one, other); }
void __sanitizer_cov_trace_cmp8(uint64_t one, uint64_t other) { note(one, other); }
void __sanitizer_cov_trace_const_cmp1(uint8_t one, uint8_t other) { (void)one, (void)other; }
void __sanitizer_cov_trace_const_cmp2(uint16_t one, uint16_t other) { note(one, other); }
void __sanitizer_cov_trace_const_cmp4(uint32_t one, uint32_t other) { note(one, other); }
void __sanitizer_cov_trace_const_cmp8(uint64_t one, uint64_t other) { note(one, other); }
void __sanitizer_cov_trace_cmpf(float one, float other) { (void)one, (void)other; }
void __sanitizer_cov_trace_cmpd(double one, double other) { (void)one, (void)other; }
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t *cases)
{
    for (uint64_t i = 0; i < cases[0] && i < 16; i++)
        note(cases[2 + i], value);
}
