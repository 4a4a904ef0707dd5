/* A seekable JPEG: baseline, in one scan, with a restart marker at each row of MCUs, and a segment at its front that
 * says where those rows begin, with a checksum of the file. All else reads it as any JPEG; see docs/transforms.md.
 *
 *     FF D8                    start of the image
 *     FF E0 00 10 ...          JFIF's segment of 18 bytes, where the file has one: it wants to be the first
 *     FF E9, length            the segment, application data 9:
 *         "raypipe seekable"       16 bytes
 *         checksum                 CRC-32 of all bytes of the file but these 4
 *         places                   4 bytes each: where in the file a row's codes begin, for each row of MCUs
 *
 * Numbers have their highest byte first, as in all of a JPEG. The segment has a fixed place, and half of the
 * bytes of its tag will do, so that damage does not make the file a plain JPEG, in which it would go unseen.
 *
 * Places are as untrusted as all bytes: a checksum can be made to fit.
 */
#ifndef RAYPIPE_JPEG_SEEK_H
#define RAYPIPE_JPEG_SEEK_H

#include "crc32.h"

#define SEEK_MARKER 0xE9
#define SEEK_TAG "raypipe seekable"
#define SEEK_TAG_BYTES 16
#define SEEK_HEAD_BYTES (4 + SEEK_TAG_BYTES + 4) /* before the places */
#define JFIF_BYTES 18                            /* as libjpeg writes it, without a thumbnail */

typedef struct {
    const uint8_t *file, *segment; /* NULL: a plain JPEG */
    uint32_t num_rows;
} Seek;

static inline uint32_t big_endian(const uint8_t *from)
{
    return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
}

static inline uint32_t place_of_row(const Seek *seek, uint32_t row)
{
    return big_endian(seek->segment + SEEK_HEAD_BYTES + 4 * (size_t)row);
}

static inline int is_seek_tag(const uint8_t *bytes)
{
    int num_equal = 0;
    for (int i = 0; i < SEEK_TAG_BYTES; i++)
        num_equal += bytes[i] == (uint8_t)SEEK_TAG[i];
    return 2 * num_equal >= SEEK_TAG_BYTES;
}

static inline Seek find_seek(const uint8_t *data, size_t size)
{
    for (size_t at = 2; at <= 2 + JFIF_BYTES; at += JFIF_BYTES) {
        if (size < at + SEEK_HEAD_BYTES)
            break;
        if (is_seek_tag(data + at + 4)) {
            const size_t length = (size_t)data[at + 2] << 8 | data[at + 3];
            const size_t num = length + 2 < SEEK_HEAD_BYTES ? 0 : (length + 2 - SEEK_HEAD_BYTES) / 4;
            const size_t most = (size - at - SEEK_HEAD_BYTES) / 4;
            return (Seek){data, data + at, (uint32_t)(num < most ? num : most)};
        }
    }
    return (Seek){NULL, NULL, 0};
}

static inline uint32_t seek_checksum(const uint8_t *data, size_t size, const Seek *seek)
{
    const uint8_t *behind = seek->segment + SEEK_HEAD_BYTES;
    const uint32_t crc = crc_of(0xFFFFFFFF, data, (size_t)(behind - 4 - data));
    return ~crc_of(crc, behind, size - (size_t)(behind - data));
}

static inline int is_undamaged(const uint8_t *data, size_t size, const Seek *seek)
{
    return seek_checksum(data, size, seek) == big_endian(seek->segment + SEEK_HEAD_BYTES - 4);
}
#endif
