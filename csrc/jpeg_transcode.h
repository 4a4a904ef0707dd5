/* A JPEG as a seekable one, see jpeg_seek.h: the same coefficients, by optimal Huffman tables, in one baseline scan.
 *
 * Pixels are those of the original, to the bit, and so is what stands in its application data and comments: EXIF,
 * ICC profiles. Refused is what decode_crop refuses, so that all others stay as they are.
 */
#ifndef RAYPIPE_JPEG_TRANSCODE_H
#define RAYPIPE_JPEG_TRANSCODE_H

#include "jpeg_crop.h"

typedef struct {
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    Trouble trouble;
    unsigned char *plain; /* written by libjpeg, without the segment */
    unsigned long plain_size;
    unsigned char *result;
    size_t size;
} Transcoder;

static int is_tagged(const uint8_t *body, size_t size, const char *tag, size_t tag_bytes)
{
    return size >= tag_bytes && memcmp(body, tag, tag_bytes) == 0;
}

/* Application data and comments, but for what libjpeg has written by itself, and an older segment of places. */
static void copy_markers(const struct jpeg_decompress_struct *from, struct jpeg_compress_struct *to)
{
    for (jpeg_saved_marker_ptr saved = from->marker_list; saved; saved = saved->next) {
        const int marker = saved->marker;
        const size_t size = saved->data_length;
        if ((marker == JPEG_APP0 && to->write_JFIF_header && is_tagged(saved->data, size, "JFIF", 5)) ||
            (marker == JPEG_APP0 + 14 && to->write_Adobe_marker && is_tagged(saved->data, size, "Adobe", 5)) ||
            (marker == SEEK_MARKER && is_tagged(saved->data, size, SEEK_TAG, SEEK_TAG_BYTES)))
            continue;
        jpeg_write_marker(to, marker, saved->data, saved->data_length);
    }
}

static void write_plain(Transcoder *t, const unsigned char *data, size_t size)
{
    jpeg_create_decompress(&t->from);
    jpeg_create_compress(&t->to);
    jpeg_mem_src(&t->from, data, (unsigned long)size);
    jpeg_save_markers(&t->from, JPEG_COM, 0xFFFF);
    for (int i = 0; i < 16; i++)
        jpeg_save_markers(&t->from, JPEG_APP0 + i, 0xFFFF);
    jpeg_read_header(&t->from, TRUE);
    if (!is_usual(&t->from))
        refuse(&t->trouble, "an unusual kind of JPEG");
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(&t->from);
    if (!is_complete(&t->from))
        refuse(&t->trouble, "a progressive JPEG that lacks scans");
    jpeg_copy_critical_parameters(&t->from, &t->to);
    t->to.optimize_coding = TRUE;
    t->to.restart_in_rows = 1;
    jpeg_mem_dest(&t->to, &t->plain, &t->plain_size);
    jpeg_write_coefficients(&t->to, coefficients);
    copy_markers(&t->from, &t->to);
    jpeg_finish_compress(&t->to);
    jpeg_finish_decompress(&t->from);
}

/* Where the codes of the scan begin; 0: nowhere. */
static size_t begin_of_codes(const unsigned char *data, size_t size)
{
    for (size_t at = 2; at + 4 <= size;) {
        const size_t end = at + 2 + ((size_t)data[at + 2] << 8 | data[at + 3]);
        if (data[at + 1] == 0xDA)
            return end;
        at = end;
    }
    return 0;
}

static void put_big_endian(uint8_t *to, size_t value)
{
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(value >> (24 - 8 * i));
}

static void add_segment(Transcoder *t)
{
    const size_t size = t->plain_size, codes = begin_of_codes(t->plain, size);
    const size_t num_rows = (t->from.image_height + 8 * (size_t)t->from.max_v_samp_factor - 1) /
                            (8 * (size_t)t->from.max_v_samp_factor);
    const size_t head = t->plain[3] == 0xE0 ? 2 + JFIF_BYTES : 2;
    const size_t length = SEEK_HEAD_BYTES + 4 * num_rows;
    t->size = size + length;
    t->result = malloc(t->size);
    if (!t->result)
        refuse(&t->trouble, "no memory");
    if (t->size > UINT32_MAX)
        refuse(&t->trouble, "a JPEG of more than 4 GiB");
    memcpy(t->result, t->plain, head);
    memcpy(t->result + head + length, t->plain + head, size - head);
    uint8_t *segment = t->result + head, *place = segment + SEEK_HEAD_BYTES, *end = place + 4 * num_rows;
    segment[0] = 0xFF;
    segment[1] = SEEK_MARKER;
    segment[2] = (uint8_t)((length - 2) >> 8);
    segment[3] = (uint8_t)(length - 2);
    memcpy(segment + 4, SEEK_TAG, SEEK_TAG_BYTES);
    put_big_endian(place, codes + length);
    place += 4;
    for (size_t at = codes; at + 2 <= size; at++) {
        const unsigned char *mark = memchr(t->plain + at, 0xFF, size - 1 - at);
        if (!mark)
            break;
        at = (size_t)(mark - t->plain) + 1;
        if (mark[1] < JPEG_RST0 || mark[1] > JPEG_RST0 + 7)
            continue;
        if (place == end)
            refuse(&t->trouble, "libjpeg writes more rows than there are");
        put_big_endian(place, at + 1 + length);
        place += 4;
    }
    if (place != end)
        refuse(&t->trouble, "libjpeg writes fewer rows than there are");
    const Seek seek = find_seek(t->result, t->size);
    put_big_endian(segment + SEEK_HEAD_BYTES - 4, seek_checksum(t->result, t->size, &seek));
}

/* Sets result and size; or returns -1, with trouble.message. The caller frees `result` in any case. */
static int transcode(Transcoder *t, const unsigned char *data, size_t size)
{
    memset(t, 0, sizeof *t);
    t->from.err = t->to.err = jpeg_std_error(&t->trouble.manager);
    t->trouble.manager.error_exit = on_error;
    t->trouble.manager.emit_message = on_message;
    t->trouble.manager.output_message = on_output;
    const int failed = setjmp(t->trouble.escape);
    if (!failed) {
        write_plain(t, data, size);
        add_segment(t);
    }
    jpeg_destroy_compress(&t->to);
    jpeg_destroy_decompress(&t->from);
    free(t->plain);
    return failed ? -1 : 0;
}
#endif
