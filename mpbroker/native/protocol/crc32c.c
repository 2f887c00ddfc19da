/* This uses the CPU's instruction for CRC-32C if there is one, else a table. The crc32c
 * package reads three streams at a time instead, which is faster for large batches
 * only.
 */

#include "protocol/crc32c.h"

#include <string.h>

#define POLYNOMIAL 0x82F63B78u /* Castagnoli's polynomial, with its bits reversed */

static uint32_t table[256];

static void
make_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[i] = crc;
    }
}

static uint32_t
crc_by_table(uint32_t crc, const uint8_t *data, size_t length)
{
    if (table[1] == 0)
        make_table();
    for (; length > 0; length--)
        crc = crc >> 8 ^ table[(crc ^ *data++) & 0xFF];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
/* Clang (zig, which builds our wheels) has a feature name of its own for the
 * instruction; older gcc does not know this name. */
#ifdef __clang__
__attribute__((target("sse4.2,crc32")))
#else
__attribute__((target("sse4.2")))
#endif
static uint32_t
crc_by_instruction(uint32_t crc, const uint8_t *data, size_t length)
{
    uint64_t wide = crc;
    for (; length >= 8; length -= 8, data += 8) {
        uint64_t chunk;
        memcpy(&chunk, data, 8);
        wide = __builtin_ia32_crc32di(wide, chunk);
    }
    crc = (uint32_t)wide;
    for (; length > 0; length--)
        crc = __builtin_ia32_crc32qi(crc, *data++);
    return crc;
}
#endif

uint32_t
crc32c(const uint8_t *data, size_t length)
{
#if defined(__x86_64__) && defined(__GNUC__)
    static int known = -1;
    if (known < 0)
        known = __builtin_cpu_supports("sse4.2") != 0;
    if (known)
        return ~crc_by_instruction(~0u, data, length);
#endif
    return ~crc_by_table(~0u, data, length);
}
