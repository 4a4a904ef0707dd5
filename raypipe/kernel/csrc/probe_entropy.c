/* A program that shows that libjpeg's struct is as jpeg_entropy.h has it: exit code 0.
 *
 * It decodes an image twice, the second time with a function in `decode_mcu` that counts its calls and calls libjpeg's
 * own. Both must give the same pixels, and the calls must be as many as the image has blocks, whether rows are read or
 * skipped. In another place of memory, the function is not called, or the program crashes.
 */
#include "jpeg_entropy.h"

#include <stdlib.h>
#include <string.h>

#define SIDE 64
#define NUM_BLOCKS ((SIDE / DCTSIZE) * (SIDE / DCTSIZE))
#define NUM_SKIPPED 24 /* rows */

static boolean (*original)(j_decompress_ptr info, JBLOCKROW *blocks);
static int num_calls, num_without_blocks;

static boolean count(j_decompress_ptr info, JBLOCKROW *blocks)
{
    num_calls++;
    num_without_blocks += blocks == NULL;
    return original(info, blocks);
}

static void decode(unsigned char *data, unsigned long size, int is_counted, unsigned char *pixels)
{
    struct jpeg_decompress_struct info;
    struct jpeg_error_mgr errors;
    info.err = jpeg_std_error(&errors); /* an error ends the program, with exit code 1 */
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, data, size);
    jpeg_read_header(&info, TRUE);
    jpeg_start_decompress(&info);
    if (is_counted) {
        original = info.entropy->decode_mcu;
        info.entropy->decode_mcu = count;
    }
    if (jpeg_skip_scanlines(&info, NUM_SKIPPED) != NUM_SKIPPED)
        exit(2);
    while (info.output_scanline < info.output_height) {
        JSAMPROW row = pixels + info.output_scanline * SIDE;
        jpeg_read_scanlines(&info, &row, 1);
    }
    jpeg_finish_decompress(&info);
    jpeg_destroy_decompress(&info);
}

int main(void)
{
    static unsigned char image[SIDE * SIDE], plain[SIDE * SIDE], counted[SIDE * SIDE];
    unsigned char *data = NULL;
    unsigned long size = 0;
    struct jpeg_compress_struct info;
    struct jpeg_error_mgr errors;
    for (int i = 0; i < SIDE * SIDE; i++)
        image[i] = (unsigned char)(i * i % 251);
    info.err = jpeg_std_error(&errors);
    jpeg_create_compress(&info);
    jpeg_mem_dest(&info, &data, &size);
    info.image_width = info.image_height = SIDE;
    info.input_components = 1;
    info.in_color_space = JCS_GRAYSCALE;
    jpeg_set_defaults(&info);
    jpeg_start_compress(&info, TRUE);
    for (int y = 0; y < SIDE; y++) {
        JSAMPROW row = image + y * SIDE;
        jpeg_write_scanlines(&info, &row, 1);
    }
    jpeg_finish_compress(&info);
    jpeg_destroy_compress(&info);
    decode(data, size, 0, plain);
    decode(data, size, 1, counted);
    free(data);
    if (num_calls != NUM_BLOCKS || num_without_blocks != NUM_BLOCKS * NUM_SKIPPED / SIDE)
        return 3;
    return memcmp(plain, counted, sizeof plain) ? 4 : 0;
}
