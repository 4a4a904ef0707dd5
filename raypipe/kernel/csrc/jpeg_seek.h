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

#include "bounds.h"
#include "crc32.h"

#define SEEK_MARKER 0xE9
#define SEEK_TAG "raypipe seekable"
#define SEEK_TAG_BYTES 16
#define CHECKSUM_BYTES 4
#define PLACE_BYTES 4
#define SEEK_HEAD_BYTES (4 + SEEK_TAG_BYTES + CHECKSUM_BYTES) /* before the places */
#define JFIF_BYTES 18                                         /* as libjpeg writes it, without a thumbnail */

typedef struct {
    Reader file;
    size_t checksum; /* its place in the file; 0: a plain JPEG */
    Reader places;
} Seek;

static inline size_t num_rows_of(const Seek *seek) { return seek->places.left / PLACE_BYTES; }

/* 0: there is no such row. The place may be anywhere, or nowhere. */
static inline int place_of_row(const Seek *seek, size_t row, uint64_t *place)
{
    Reader bytes;
    return part_of(&seek->places, (uint64_t)row * PLACE_BYTES, PLACE_BYTES, &bytes) &&
           take_big(&bytes, PLACE_BYTES, place);
}

static inline int is_seek_tag(Reader tag)
{
    int num_equal = 0;
    for (int i = 0; i < SEEK_TAG_BYTES; i++)
        num_equal += byte_at(&tag, (size_t)i) == SEEK_TAG[i];
    return 2 * num_equal >= SEEK_TAG_BYTES;
}

static inline Seek find_seek(Reader file)
{
    for (size_t at = 2; at <= 2 + JFIF_BYTES; at += JFIF_BYTES) {
        Seek seek = {.file = file, .checksum = at + 4 + SEEK_TAG_BYTES};
        Reader rest = file, tag;
        uint64_t length;
        if (!pass(&rest, at + 2) || !take_big(&rest, 2, &length) || !take(&rest, SEEK_TAG_BYTES, &tag) ||
            !pass(&rest, CHECKSUM_BYTES))
            break;
        if (!is_seek_tag(tag))
            continue;
        /* A damaged length reaches as far as the file does: the checksum will not fit. */
        const uint64_t num_bytes = length + 2 < SEEK_HEAD_BYTES ? 0 : length + 2 - SEEK_HEAD_BYTES;
        if (!take(&rest, num_bytes, &seek.places))
            seek.places = rest;
        return seek;
    }
    return (Seek){0};
}

/* 0: the file is too short to have one. */
static inline int seek_checksum(const Seek *seek, uint32_t *checksum)
{
    Reader before, rest = seek->file;
    if (!take(&rest, seek->checksum, &before) || !pass(&rest, CHECKSUM_BYTES))
        return 0;
    *checksum = ~crc_of(crc_of(0xFFFFFFFF, before.at, before.left), rest.at, rest.left);
    return 1;
}

static inline int is_undamaged(const Seek *seek)
{
    uint32_t checksum;
    uint64_t written;
    Reader rest = seek->file;
    return pass(&rest, seek->checksum) && take_big(&rest, CHECKSUM_BYTES, &written) && seek_checksum(seek, &checksum) &&
           written == checksum;
}
#endif
