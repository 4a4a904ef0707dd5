/* Bytes from outside, and the buffers that they are copied into: every length, offset and index of a file comes here.
 *
 * A Reader is what is left of some bytes, and a Writer what is left of a buffer. Only the functions below advance them.
 * Each returns 0, and changes nothing, where there is less than was asked for. So a number from a file is compared with
 * the very buffer that it is used on, and never with another one: tests/test_csrc.py finds each copy made elsewhere.
 */
#ifndef RAYPIPE_BOUNDS_H
#define RAYPIPE_BOUNDS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *at;
    size_t left;
} Reader;

typedef struct {
    uint8_t *at;
    size_t left;
} Writer;

/* Nothing is a place too: no offset, not even 0, may be added to NULL. */
static uint8_t nowhere[1];
static inline Reader reader_of(const void *bytes, size_t size) { return (Reader){bytes ? bytes : nowhere, size}; }
static inline Writer writer_of(void *bytes, size_t size) { return (Writer){bytes ? bytes : nowhere, size}; }

/* Part of some bytes, by its place among them. */
static inline int part_of(const Reader *whole, uint64_t place, uint64_t num, Reader *part)
{
    if (place > whole->left || num > whole->left - place)
        return 0;
    *part = (Reader){whole->at + place, (size_t)num};
    return 1;
}

/* The next bytes. */
static inline int take(Reader *from, uint64_t num, Reader *taken)
{
    if (!part_of(from, 0, num, taken))
        return 0;
    *from = (Reader){from->at + num, from->left - (size_t)num};
    return 1;
}

static inline int pass(Reader *from, uint64_t num)
{
    Reader passed;
    return take(from, num, &passed);
}

/* Leaves the last bytes out. */
static inline int cut(Reader *from, size_t num) { return part_of(from, 0, from->left - num, from); }

/* -1: there are not so many. */
static inline int byte_at(const Reader *from, size_t place) { return place < from->left ? from->at[place] : -1; }

/* A number of up to 8 bytes, the highest first. */
static inline int take_big(Reader *from, int num, uint64_t *value)
{
    Reader bytes;
    if (!take(from, (uint64_t)num, &bytes))
        return 0;
    *value = 0;
    for (int i = 0; i < num; i++)
        *value = *value << 8 | bytes.at[i];
    return 1;
}

/* The same, the lowest first. */
static inline int take_little(Reader *from, int num, uint64_t *value)
{
    Reader bytes;
    if (!take(from, (uint64_t)num, &bytes))
        return 0;
    *value = 0;
    for (int i = num - 1; i >= 0; i--)
        *value = *value << 8 | bytes.at[i];
    return 1;
}

/* How many bytes come before the first one of this value; all, if there is none. */
static inline size_t num_before(const Reader *from, int value)
{
    const uint8_t *found = from->left ? memchr(from->at, value, from->left) : NULL;
    return found ? (size_t)(found - from->at) : from->left;
}

static inline int begins_with(const Reader *from, const void *tag, size_t num)
{
    return from->left >= num && memcmp(from->at, tag, num) == 0;
}

/* The next bytes of a buffer, to be filled apart. */
static inline int set_aside(Writer *to, uint64_t num, Writer *aside)
{
    if (num > to->left)
        return 0;
    *aside = (Writer){to->at, (size_t)num};
    *to = (Writer){to->at + num, to->left - (size_t)num};
    return 1;
}

static inline int put(Writer *to, Reader from)
{
    Writer room;
    if (!set_aside(to, from.left, &room))
        return 0;
    if (from.left) /* NULL is not a place to copy nothing from */
        memcpy(room.at, from.at, from.left);
    return 1;
}

static inline int put_zeros(Writer *to, uint64_t num)
{
    Writer room;
    if (!set_aside(to, num, &room))
        return 0;
    if (num)
        memset(room.at, 0, (size_t)num);
    return 1;
}

/* A number of `num` bytes, the highest first. */
static inline int put_big(Writer *to, int num, uint64_t value)
{
    Writer room;
    if (!set_aside(to, (uint64_t)num, &room))
        return 0;
    for (int i = 0; i < num; i++)
        room.at[i] = (uint8_t)(value >> (8 * (num - 1 - i)));
    return 1;
}
#endif
