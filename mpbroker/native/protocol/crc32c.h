/* CRC-32C of small batches; the crc32c package is faster from about 256 KiB on. */

#ifndef MPBROKER_CRC32C_H
#define MPBROKER_CRC32C_H

#include <stddef.h>
#include <stdint.h>

uint32_t crc32c(const uint8_t *data, size_t length);

#endif
