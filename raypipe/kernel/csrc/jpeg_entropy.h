/* The beginning of a struct of libjpeg's inside, of which jpeg_crop.h replaces `decode_mcu` by its own function.
 *
 * jpegint.h, which declares it, is seldom installed. All versions that are known have it so; probe_entropy.c shows it
 * of the one at hand. Only where that has run, CHECKED_ENTROPY is defined: without, libjpeg reads the codes itself.
 */
#ifndef RAYPIPE_JPEG_ENTROPY_H
#define RAYPIPE_JPEG_ENTROPY_H

#include <stdio.h>

#include <jpeglib.h>

struct jpeg_entropy_decoder {
    void (*start_pass)(j_decompress_ptr info);
    boolean (*decode_mcu)(j_decompress_ptr info, JBLOCKROW *blocks);
};

#endif
