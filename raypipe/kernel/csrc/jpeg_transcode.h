/* A JPEG as a seekable one, see jpeg_seek.h: the same coefficients, by optimal Huffman tables, in one baseline scan.
 *
 * Pixels are those of the original, to the bit, and so is what stands in its application data and comments: EXIF,
 * ICC profiles. Refused is what decode_crop refuses, so that all others stay as they are.
 *
 * Behind setjmp, only the Transcoder is used, which holds the pointer to all that has to be freed.
 */
#ifndef RAYPIPE_JPEG_TRANSCODE_H
#define RAYPIPE_JPEG_TRANSCODE_H

#include "jpeg_crop.h"

#define FIRST_OUTPUT_BYTES 65536

/* Where libjpeg writes to. Its own (jpeg_mem_dest) says only at the end where the bytes are, and frees those that the
 * caller knows of before; so an error in between leaves nobody who knows what to free. */
typedef struct {
    struct jpeg_destination_mgr manager; /* first: libjpeg hands it back as its own */
    uint8_t *bytes;
    size_t size, used;
} Output;

typedef struct {
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    Trouble trouble;
    Output plain; /* without the segment */
    uint8_t *result;
    size_t size;
    int is_done;
} Transcoder;

/* Makes room for as many bytes as there are already, or the first ones. */
static void grow_output(j_compress_ptr info)
{
    Output *output = (Output *)info->dest;
    const size_t used = output->size, size = used ? 2 * used : FIRST_OUTPUT_BYTES;
    uint8_t *bytes = used > UINT32_MAX ? NULL : realloc(output->bytes, size);
    if (!bytes)
        refuse((Trouble *)info->err, "no memory");
    output->bytes = bytes;
    output->size = size;
    output->manager.next_output_byte = bytes + used;
    output->manager.free_in_buffer = size - used;
}

static boolean on_full_output(j_compress_ptr info)
{
    grow_output(info);
    return TRUE;
}

static void end_output(j_compress_ptr info)
{
    Output *output = (Output *)info->dest;
    output->used = output->size - output->manager.free_in_buffer;
}

/* Application data and comments, but for what libjpeg has written by itself, and an older segment of places. */
static void copy_markers(const struct jpeg_decompress_struct *from, struct jpeg_compress_struct *to)
{
    for (jpeg_saved_marker_ptr saved = from->marker_list; saved; saved = saved->next) {
        const int marker = saved->marker;
        const Reader data = reader_of(saved->data, saved->data_length);
        if ((marker == JPEG_APP0 && to->write_JFIF_header && begins_with(&data, "JFIF", 5)) ||
            (marker == JPEG_APP0 + 14 && to->write_Adobe_marker && begins_with(&data, "Adobe", 5)) ||
            (marker == SEEK_MARKER && begins_with(&data, SEEK_TAG, SEEK_TAG_BYTES)))
            continue;
        jpeg_write_marker(to, marker, saved->data, saved->data_length);
    }
}

static void write_plain(Transcoder *t, const unsigned char *data, size_t size)
{
    const Seek seek = find_seek(reader_of(data, size));
    if (seek.checksum && !is_undamaged(&seek)) /* or damage would get a checksum that fits */
        refuse(&t->trouble, "its checksum is wrong");
    jpeg_create_decompress(&t->from);
    jpeg_create_compress(&t->to);
    jpeg_mem_src(&t->from, data, (unsigned long)size);
    jpeg_save_markers(&t->from, JPEG_COM, 0xFFFF);
    for (int i = 0; i < 16; i++)
        jpeg_save_markers(&t->from, JPEG_APP0 + i, 0xFFFF);
    jpeg_read_header(&t->from, TRUE);
    if (!is_usual(&t->from))
        refuse(&t->trouble, "an unusual kind of JPEG");
    if ((size_t)t->from.image_height * t->from.image_width > MAX_PIXELS) /* all coefficients are held at a time */
        refuse(&t->trouble, "over the limit of pixels");
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(&t->from);
    if (!is_complete(&t->from))
        refuse(&t->trouble, "a progressive JPEG that lacks scans");
    jpeg_copy_critical_parameters(&t->from, &t->to);
    t->to.optimize_coding = TRUE;
    t->to.restart_in_rows = 1;
    t->plain.manager.init_destination = grow_output;
    t->plain.manager.empty_output_buffer = on_full_output;
    t->plain.manager.term_destination = end_output;
    t->to.dest = &t->plain.manager;
    jpeg_write_coefficients(&t->to, coefficients);
    copy_markers(&t->from, &t->to);
    jpeg_finish_compress(&t->to);
    jpeg_finish_decompress(&t->from);
}

/* Where the codes of the scan begin; 0: nowhere. */
static size_t begin_of_codes(Reader file)
{
    Reader rest = file;
    uint64_t marker, length;
    for (int is_going = pass(&rest, 2); is_going && take_big(&rest, 2, &marker) && take_big(&rest, 2, &length);) {
        is_going = length >= 2 && pass(&rest, length - 2);
        if (is_going && marker == 0xFFDA)
            return file.left - rest.left;
    }
    return 0;
}

/* Where each row's codes begin in the file that has the segment, `length` bytes before them. 0: there are more rows, or
 * fewer. */
static int put_places(Writer *places, Reader file, size_t length)
{
    const size_t codes = begin_of_codes(file);
    Reader rest = file;
    if (!codes || !pass(&rest, codes) || !put_big(places, PLACE_BYTES, codes + length))
        return 0;
    while (pass(&rest, num_before(&rest, 0xFF) + 1)) {
        const int marker = byte_at(&rest, 0);
        if (marker >= JPEG_RST0 && marker <= JPEG_RST0 + 7 &&
            !put_big(places, PLACE_BYTES, file.left - rest.left + 1 + length))
            return 0;
    }
    return places->left == 0;
}

static void add_segment(Transcoder *t)
{
    const Reader plain = reader_of(t->plain.bytes, t->plain.used);
    const size_t mcu_height = 8 * (size_t)t->from.max_v_samp_factor;
    const size_t num_rows = (t->from.image_height + mcu_height - 1) / mcu_height;
    const size_t length = SEEK_HEAD_BYTES + PLACE_BYTES * num_rows;
    const size_t head_bytes = byte_at(&plain, 3) == 0xE0 ? 2 + JFIF_BYTES : 2;
    t->size = plain.left + length;
    if (t->size > UINT32_MAX)
        refuse(&t->trouble, "a JPEG of more than 4 GiB");
    t->result = malloc(t->size);
    if (!t->result)
        refuse(&t->trouble, "no memory");
    Reader head, rest = plain;
    Writer to = writer_of(t->result, t->size), checksum, places;
    if (!take(&rest, head_bytes, &head) || !put(&to, head) || !put_big(&to, 2, 0xFF00 | SEEK_MARKER) ||
        !put_big(&to, 2, length - 2) || !put(&to, reader_of(SEEK_TAG, SEEK_TAG_BYTES)) ||
        !set_aside(&to, CHECKSUM_BYTES, &checksum) || !set_aside(&to, PLACE_BYTES * num_rows, &places) ||
        !put(&to, rest) || !put_places(&places, plain, length))
        refuse(&t->trouble, "libjpeg writes other rows than there are");
    const Seek seek = find_seek(reader_of(t->result, t->size));
    uint32_t crc;
    if (!seek_checksum(&seek, &crc) || !put_big(&checksum, CHECKSUM_BYTES, crc))
        refuse(&t->trouble, "libjpeg writes another header than it should");
}

/* Sets result and size; or returns -1, with trouble.message. The caller frees `result` in any case. */
static int transcode(Transcoder *t, const unsigned char *data, size_t size)
{
    memset(t, 0, sizeof *t);
    t->from.err = t->to.err = jpeg_std_error(&t->trouble.manager);
    t->trouble.manager.error_exit = on_error;
    t->trouble.manager.emit_message = on_message;
    t->trouble.manager.output_message = on_output;
    if (setjmp(t->trouble.escape) == 0) {
        write_plain(t, data, size);
        add_segment(t);
        t->is_done = 1;
    }
    jpeg_destroy_compress(&t->to);
    jpeg_destroy_decompress(&t->from);
    free(t->plain.bytes);
    return t->is_done ? 0 : -1;
}
#endif
