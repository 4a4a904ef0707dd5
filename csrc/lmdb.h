/* Records of raypipe's own LMDB layout, many in one call: what raypipe/stores/lmdb_pages.py does, where all is sound.
 *
 *     lmdb_open(file, num_bytes, page_bytes, root, depth, last_page) -> reader
 *     lmdb_read(reader, keys, num_fixed, num_variable, wanted) -> (fixed, columns, done)
 *
 * `keys` are int64; `fixed` has num_fixed * 8 bytes of each, as they are stored; `columns` a list for each variable
 * column whose bit is set in `wanted`, of bytes or None; `done` a byte for each key. Where it is 0, anything was unusual
 * or damaged: the caller reads that key by its own way, which has the last word.
 *
 * One thread reads at a time; of a call beside it nothing is done.
 *
 * All is read by pread, as there: a file that is cut short while it is open costs a sample, and not the process. Bytes
 * are untrusted, and no number of theirs is used before it has been compared with the sizes of what was read.
 */
#ifndef RAYPIPE_LMDB_H
#define RAYPIPE_LMDB_H

#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE_HEADER 16
#define NODE_HEADER 8
#define KEY_BYTES 8
#define MAX_PAGE_BYTES 32768
#define MAX_DEPTH 32
#define MAX_RECORD (1u << 29)   /* MAX_SAMPLE_BYTES of raypipe/stores/base.py */
#define NO_VALUE 0xFFFFFFFFu    /* a length that says None */
#define MAX_VARIABLE 64         /* bits of `wanted` */
enum { BRANCH_PAGE = 1, LEAF_PAGE = 2, OVERFLOW_PAGE = 4, LONG_VALUE = 1 };

/* Branch pages that are kept: two levels of six million keys are 200 of them, see lmdb_pages.py. */
#define NUM_KEPT 1024

typedef struct {
    int file;
    uint64_t num_bytes, page_bytes, root, last_page;
    int depth;
    uint64_t kept_numbers[NUM_KEPT]; /* 0: none, since that is a meta page */
    uint8_t *kept[NUM_KEPT];
    uint8_t *record; /* the one at hand */
    size_t record_bytes;
    PyThread_type_lock lock; /* held by the call that reads */
} LmdbReader;

static inline uint64_t little(const uint8_t *bytes, int num)
{
    uint64_t value = 0;
    for (int i = num - 1; i >= 0; i--)
        value = value << 8 | bytes[i];
    return value;
}

static int read_at(const LmdbReader *reader, uint64_t number, size_t num, uint8_t *bytes)
{
    const uint64_t start = number * reader->page_bytes;
    if (number < 2 || number > reader->last_page || start + num > reader->num_bytes)
        return 0;
    return pread(reader->file, bytes, num, (off_t)start) == (ssize_t)num;
}

/* The page's number of nodes; 0: it is not a sound page of this kind. */
static int num_nodes_of(const LmdbReader *reader, const uint8_t *page, uint64_t number, unsigned kind)
{
    const unsigned lower = (unsigned)little(page + 12, 2), upper = (unsigned)little(page + 14, 2);
    if (little(page, 8) != number || little(page + 10, 2) != kind || lower < PAGE_HEADER + 2 || lower > upper ||
        upper > reader->page_bytes)
        return 0;
    return (int)(lower - PAGE_HEADER) / 2;
}

/* Where a node begins; 0: outside of its page. Its key may be of any length, and lies in the page. */
static unsigned node_at(const LmdbReader *reader, const uint8_t *page, int slot)
{
    const unsigned start = (unsigned)little(page + PAGE_HEADER + 2 * slot, 2);
    if (start + NODE_HEADER > reader->page_bytes ||
        start + NODE_HEADER + little(page + start + 6, 2) > reader->page_bytes)
        return 0;
    return start;
}

/* As bytes compare: a key that is the other's beginning comes first. */
static int compare(const uint8_t *page, unsigned start, const uint8_t key[KEY_BYTES])
{
    const size_t num = (size_t)little(page + start + 6, 2);
    const int order = memcmp(page + start + NODE_HEADER, key, num < KEY_BYTES ? num : KEY_BYTES);
    return order ? order : num < KEY_BYTES ? -1 : num > KEY_BYTES;
}

/* A branch page, kept or read; NULL: it is not sound, and its keys do not ascend. */
static const uint8_t *branch_page(LmdbReader *reader, uint64_t number)
{
    const size_t place = number % NUM_KEPT;
    if (number && reader->kept_numbers[place] == number)
        return reader->kept[place];
    if (!reader->kept[place] && !(reader->kept[place] = malloc(reader->page_bytes)))
        return NULL;
    reader->kept_numbers[place] = 0;
    uint8_t *page = reader->kept[place];
    if (!read_at(reader, number, reader->page_bytes, page))
        return NULL;
    const int num = num_nodes_of(reader, page, number, BRANCH_PAGE);
    for (int slot = 0; slot < num; slot++) {
        const unsigned start = node_at(reader, page, slot);
        if (!start)
            return NULL;
        if (slot > 1) { /* the first key says nothing */
            const unsigned before = node_at(reader, page, slot - 1);
            const size_t a = (size_t)little(page + before + 6, 2), b = (size_t)little(page + start + 6, 2);
            const int order = memcmp(page + before + NODE_HEADER, page + start + NODE_HEADER, a < b ? a : b);
            if (order > 0 || (order == 0 && a >= b))
                return NULL;
        }
    }
    if (!num)
        return NULL;
    reader->kept_numbers[place] = number;
    return page;
}

/* A value that has pages of its own, read into reader->record; NULL: it is not sound. */
static const uint8_t *long_value(LmdbReader *reader, uint64_t number, size_t num)
{
    if (num > MAX_RECORD)
        return NULL;
    if (reader->record_bytes < PAGE_HEADER + num) {
        free(reader->record);
        reader->record_bytes = PAGE_HEADER + num + num / 4;
        if (!(reader->record = malloc(reader->record_bytes))) {
            reader->record_bytes = 0;
            return NULL;
        }
    }
    if (!read_at(reader, number, PAGE_HEADER + num, reader->record))
        return NULL;
    const uint64_t num_pages = little(reader->record + 12, 4);
    if (little(reader->record, 8) != number || little(reader->record + 10, 2) != OVERFLOW_PAGE ||
        num_pages * reader->page_bytes < PAGE_HEADER + num || number + num_pages > reader->last_page + 1)
        return NULL;
    return reader->record + PAGE_HEADER;
}

/* Finds a key's record. It lies in `leaf`, or is read into reader->record; NULL: there is none to be had here. */
static const uint8_t *find_record(LmdbReader *reader, uint64_t index, uint8_t *leaf, size_t *num_bytes)
{
    uint8_t key[KEY_BYTES];
    for (int i = 0; i < KEY_BYTES; i++)
        key[i] = (uint8_t)(index >> (8 * (KEY_BYTES - 1 - i)));
    uint64_t number = reader->root;
    for (int level = 1; level < reader->depth; level++) {
        const uint8_t *page = branch_page(reader, number);
        if (!page)
            return NULL;
        int low = 1, high = num_nodes_of(reader, page, number, BRANCH_PAGE); /* the first whose key is above */
        while (low < high) {
            const int middle = (low + high) / 2;
            if (compare(page, node_at(reader, page, middle), key) > 0)
                high = middle;
            else
                low = middle + 1;
        }
        number = little(page + node_at(reader, page, low - 1), 6);
    }
    if (!read_at(reader, number, reader->page_bytes, leaf))
        return NULL;
    const int num_nodes = num_nodes_of(reader, leaf, number, LEAF_PAGE);
    int low = 0, high = num_nodes; /* the first whose key is not below: in damaged order too, as Python's bisect_left */
    while (low < high) {
        const int middle = (low + high) / 2;
        const unsigned start = node_at(reader, leaf, middle);
        if (!start)
            return NULL;
        if (compare(leaf, start, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    const unsigned start = low < num_nodes ? node_at(reader, leaf, low) : 0;
    if (!start || compare(leaf, start, key) != 0)
        return NULL;
    const size_t num = (size_t)little(leaf + start, 4), value = start + NODE_HEADER + KEY_BYTES;
    const unsigned flags = (unsigned)little(leaf + start + 4, 2);
    *num_bytes = num;
    if (flags == 0)
        return value + num <= reader->page_bytes ? leaf + value : NULL;
    return flags == LONG_VALUE && value + 8 <= reader->page_bytes ? long_value(reader, little(leaf + value, 8), num) : NULL;
}

static void close_reader(PyObject *capsule)
{
    LmdbReader *reader = PyCapsule_GetPointer(capsule, "raypipe.lmdb");
    if (!reader)
        return;
    for (int i = 0; i < NUM_KEPT; i++)
        free(reader->kept[i]);
    free(reader->record);
    PyThread_free_lock(reader->lock);
    free(reader);
}

static PyObject *py_lmdb_open(PyObject *self, PyObject *args)
{
    (void)self;
    int file, depth;
    unsigned long long num_bytes, page_bytes, root, last_page;
    if (!PyArg_ParseTuple(args, "iKKKiK", &file, &num_bytes, &page_bytes, &root, &depth, &last_page))
        return NULL;
    if (page_bytes < 512 || page_bytes > MAX_PAGE_BYTES || depth < 1 || depth > MAX_DEPTH ||
        last_page > UINT64_MAX / MAX_PAGE_BYTES - MAX_RECORD || num_bytes > INT64_MAX)
        return PyErr_Format(PyExc_ValueError, "not a tree of LMDB that is read here");
    LmdbReader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return PyErr_NoMemory();
    *reader = (LmdbReader){file, num_bytes, page_bytes, root, last_page, depth, {0}, {0}, NULL, 0, NULL};
    if (!(reader->lock = PyThread_allocate_lock())) {
        free(reader);
        return PyErr_NoMemory();
    }
    PyObject *capsule = PyCapsule_New(reader, "raypipe.lmdb", close_reader);
    if (!capsule) {
        PyThread_free_lock(reader->lock);
        free(reader);
    }
    return capsule;
}

/* Puts the wanted columns of a record into row `row`; 0: it is damaged, -1: a Python error. */
static int unpack_record(const uint8_t *record, size_t num_bytes, int num_fixed, int num_variable, uint64_t wanted,
                         uint8_t *fixed, PyObject *columns, Py_ssize_t row)
{
    size_t at = (size_t)num_fixed * 8;
    if (num_bytes < at)
        return 0;
    memcpy(fixed, record, at);
    Py_ssize_t column = 0;
    for (int number = 0; number < num_variable && wanted >> number; number++) {
        if (num_bytes - at < 4)
            return 0;
        const uint64_t length = little(record + at, 4);
        at += 4;
        if (length != NO_VALUE && length > num_bytes - at)
            return 0;
        if (wanted >> number & 1) {
            PyObject *value = length == NO_VALUE ? Py_NewRef(Py_None)
                                                 : PyBytes_FromStringAndSize((const char *)record + at, (Py_ssize_t)length);
            if (!value || PyList_SetItem(PyList_GetItem(columns, column), row, value) < 0)
                return -1;
            column++;
        }
        at += length == NO_VALUE ? 0 : length;
    }
    return 1;
}

static PyObject *py_lmdb_read(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    Py_buffer keys;
    int num_fixed, num_variable;
    unsigned long long wanted;
    if (!PyArg_ParseTuple(args, "Oy*iiK", &capsule, &keys, &num_fixed, &num_variable, &wanted))
        return NULL;
    const Py_ssize_t num = keys.len / 8;
    LmdbReader *reader = PyCapsule_GetPointer(capsule, "raypipe.lmdb");
    PyObject *fixed = NULL, *columns = NULL, *done = NULL, *result = NULL;
    uint8_t *leaf = NULL;
    int is_ours = 0;
    if (!reader || num_fixed < 0 || num_fixed > 1024 || num_variable < 0 || num_variable > MAX_VARIABLE) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no such layout of records");
        goto end;
    }
    fixed = PyBytes_FromStringAndSize(NULL, num * num_fixed * 8);
    done = PyBytes_FromStringAndSize(NULL, num);
    columns = PyList_New(0);
    leaf = malloc(reader->page_bytes);
    if (!fixed || !done || !columns || !leaf) {
        PyErr_NoMemory();
        goto end;
    }
    memset(PyBytes_AsString(fixed), 0, (size_t)(num * num_fixed * 8));
    for (uint64_t bits = wanted; bits; bits &= bits - 1) {
        PyObject *column = PyList_New(num);
        if (!column || PyList_Append(columns, column) < 0) {
            Py_XDECREF(column);
            goto end;
        }
        for (Py_ssize_t row = 0; row < num; row++)
            PyList_SetItem(column, row, Py_NewRef(Py_None));
        Py_DECREF(column);
    }
    memset(PyBytes_AsString(done), 0, (size_t)num);
    /* Not waited for: in a forked child, the thread that held it in its parent does not exist. */
    is_ours = PyThread_acquire_lock(reader->lock, NOWAIT_LOCK) == PY_LOCK_ACQUIRED;
    for (Py_ssize_t row = 0; row < num && is_ours; row++) {
        int64_t index;
        memcpy(&index, (const char *)keys.buf + 8 * row, sizeof index);
        size_t num_bytes = 0;
        const uint8_t *record = NULL;
        Py_BEGIN_ALLOW_THREADS
        if (index >= 0)
            record = find_record(reader, (uint64_t)index, leaf, &num_bytes);
        Py_END_ALLOW_THREADS
        const int is_done = record ? unpack_record(record, num_bytes, num_fixed, num_variable, wanted,
                                                   (uint8_t *)PyBytes_AsString(fixed) + row * num_fixed * 8, columns, row)
                                   : 0;
        if (is_done < 0)
            goto end;
        PyBytes_AsString(done)[row] = (char)is_done;
    }
    result = PyTuple_Pack(3, fixed, columns, done);
end:
    if (is_ours)
        PyThread_release_lock(reader->lock);
    free(leaf);
    Py_XDECREF(fixed);
    Py_XDECREF(columns);
    Py_XDECREF(done);
    PyBuffer_Release(&keys);
    return result;
}
#endif
